"""Begin and end of a backward are events of their own: begun is not ended."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.testing.tiny import tiny_batch
from tests.fake_meter import BASE_BYTES
from tests.runtime_steps import assert_equal, attached, gradients, loss_of, plain_gradients, step

AMPLE = FlexConfig(BASE_BYTES + 50_000_000, ("recompute",))
TIGHT = FlexConfig(BASE_BYTES + 3_600_000, ("recompute",))


class InBackward(torch.autograd.Function):
    """The identity; calls something in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.call()
        return gradient, None


@pytest.mark.parametrize("is_raw", [False, True], ids=["in a context", "outside of one"])
def test_a_forward_in_the_middle_of_a_backward_ends_nothing(model: PreTrainedModel, is_raw: bool) -> None:
    runtime = attached(model, AMPLE)
    seen: list[tuple[int, list[int], bool]] = []
    later: list[torch.Tensor] = []

    def another_forward() -> None:
        if not later:
            later.append(loss_of(model, 2))
            half_way = runtime.in_flight[0]
            seen.append((len(runtime.records), [one.number for one in runtime.in_flight], half_way.scope is not None))

    middle: Any = model.model.layers[1]
    handle = middle.register_forward_hook(lambda module, args, output: InBackward.apply(output, another_forward))
    loss = loss_of(model, 1)
    handle.remove()
    if is_raw:
        loss.backward()
    else:
        with runtime.backward():
            loss.backward()
    assert seen == [(0, [0, 1], True)]
    assert_equal(gradients(model), plain_gradients(1))
    with runtime.backward():
        later[0].backward()
    assert_equal(gradients(model), plain_gradients(2))
    assert [record.micro_batch for record in runtime.records] == [0, 1] and runtime.in_flight == []
    # What was learnt of the first is all of it: its own bytes were known, and none is left behind.
    assert runtime.records[0].actual_bytes == runtime.records[1].actual_bytes
    assert runtime.books.budgets.in_flight_bytes == 0 and not runtime.books.activities.is_any_at_work


def test_gradients_of_some_tensors_leave_it_in_flight(model: PreTrainedModel) -> None:
    """`torch.autograd.grad` before the backward, as for a gradient penalty, with and without a context around it."""
    runtime = attached(model, TIGHT)
    weight = model.lm_head.weight
    loss = loss_of(model, 1)
    (first,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    assert [one.number for one in runtime.in_flight] == [0] and runtime.records == []
    other = loss_of(model, 2)  # nor does the next forward end it
    assert [one.number for one in runtime.in_flight] == [0, 1] and runtime.records == []
    with runtime.backward():
        loss.backward()
    assert [record.micro_batch for record in runtime.records] == [0]
    found = gradients(model)
    assert torch.equal(first, found["lm_head.weight"])
    assert_equal(found, plain_gradients(1))
    with runtime.backward():
        other.backward()
    assert_equal(gradients(model), plain_gradients(2))


def test_a_backward_in_two_pieces_without_a_context(model: PreTrainedModel) -> None:
    """The first piece frees what is above the last layer, and keeps nothing; the rest is there for the second."""
    runtime = attached(model, FlexConfig(BASE_BYTES + 50_000_000))
    found: list[torch.Tensor] = []
    last: Any = model.model.layers[-1]
    handle = last.register_forward_hook(lambda module, args, output: found.append(output))
    loss = loss_of(model, 1)
    handle.remove()
    (upper,) = torch.autograd.grad(loss, found)
    (one,) = runtime.in_flight
    assert one.has_backward_begun and not one.backwards and not one.is_over
    loss_of(model, 2)
    assert runtime.in_flight[0] is one and runtime.records == []
    found[0].backward(upper)
    assert one.is_over
    expected = plain_gradients(1)
    for name, gradient in gradients(model).items():
        if "layers" in name or "embed" in name:
            assert torch.equal(gradient, expected[name]), name
    found.clear()
    del one, loss
    runtime.detach()
    assert [record.micro_batch for record in runtime.records] == [0]


def test_a_split_backward_ends_with_its_last_half(model: PreTrainedModel) -> None:
    """Gradients of inputs first, of weights later, each half under the number that a schedule gives."""
    runtime = attached(model, TIGHT)
    embedded = model.get_input_embeddings()(tiny_batch(model, 2, 64, seed=1)["input_ids"]).detach().requires_grad_()
    labels = tiny_batch(model, 2, 64, seed=1)["labels"]
    with runtime.forward("", 7):
        loss = model(inputs_embeds=embedded, labels=labels).loss
    with runtime.backward("", 7, is_last=False):
        (of_inputs,) = torch.autograd.grad(loss, [embedded], retain_graph=True)
    (one,) = runtime.in_flight
    assert one.has_backward_begun and runtime.records == [] and of_inputs.shape == embedded.shape
    weights = [parameter for name, parameter in model.named_parameters() if "embed_tokens" not in name]
    with runtime.backward("", 7):
        loss.backward(inputs=weights)
    assert runtime.in_flight == [] and [record.micro_batch for record in runtime.records] == [7]
    expected = plain_gradients(1)
    found = gradients(model)
    assert found.keys() == expected.keys() - {"model.embed_tokens.weight"}
    assert_equal(found, {name: expected[name] for name in found})


def test_numbers_from_outside(model: PreTrainedModel) -> None:
    runtime = attached(model, AMPLE)
    with runtime.forward("", 5):
        first = loss_of(model, 1)
    with pytest.raises(UserError, match=r"micro-batch 5 of part '' is in flight already"), runtime.forward("", 5):
        pass
    with pytest.raises(UserError, match=r"there is no part 'x'; this runtime manages \[''\]"), runtime.forward("x", 5):
        pass
    with pytest.raises(UserError, match=r"no micro-batch 4 of part '' is in flight"), runtime.backward("", 4):
        pass
    second = loss_of(model, 2)  # counted on from there
    with runtime.backward("", 5):
        first.backward(retain_graph=True)
    assert [record.micro_batch for record in runtime.records] == [5]  # ended explicitly, though it is kept
    with runtime.backward():
        second.backward()
    assert [record.micro_batch for record in runtime.records] == [5, 6]
    assert_equal(gradients(model), plain_gradients(1, 2))


def test_a_backward_that_failed_outside_of_a_context_is_dropped_with_its_loss(model: PreTrainedModel) -> None:
    runtime = attached(model, AMPLE)

    def fail() -> None:
        raise ArithmeticError("backward is cursed")

    middle: Any = model.model.layers[1]
    handle = middle.register_forward_hook(lambda module, args, output: InBackward.apply(output, fail))
    loss = loss_of(model, 1)
    handle.remove()
    with pytest.raises(ArithmeticError):
        loss.backward()
    (one,) = runtime.in_flight
    assert not one.is_over  # its lower layers are there still
    gone = weakref.ref(one)
    del loss, one
    model.zero_grad()
    assert_equal(step(runtime, model, 2), plain_gradients(2))
    assert runtime.in_flight == [] and gone() is None and runtime.books.budgets.in_flight_bytes == 0


def test_time_and_peak_are_its_own_where_several_are_in_flight(model: PreTrainedModel) -> None:
    """A short micro-batch beside a long one: what the long one needs is no peak of the short one, and both teach."""
    runtime = attached(model, FlexConfig(BASE_BYTES + 50_000_000, ("recompute",)))
    for seed, length in ((0, 16), (1, 128)):
        with runtime.backward():
            loss_of(model, seed, length).backward()
    alone_short, alone_long = runtime.records
    model.zero_grad()
    num_seen = len(runtime.books.correction._seen)
    short, long = loss_of(model, 2, 16), loss_of(model, 3, 128)
    with runtime.backward():
        long.backward()
    with runtime.backward():
        short.backward()
    beside_long, beside_short = runtime.records[-2:]
    assert (beside_short.num_tokens, beside_long.num_tokens) == (alone_short.num_tokens, alone_long.num_tokens)
    assert beside_short.peak_bytes <= alone_short.peak_bytes + 0.05 * (alone_short.peak_bytes - BASE_BYTES)
    assert beside_short.peak_bytes < 0.6 * beside_long.peak_bytes
    assert beside_short.predicted_peak_bytes < 0.6 * beside_long.predicted_peak_bytes
    assert len(runtime.books.correction._seen) > num_seen
    assert beside_short.step_ms < beside_short.step_ms + beside_long.step_ms
