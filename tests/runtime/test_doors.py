"""A model that is entered by another door than its forward is managed all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from flex_trainer import FlexTrainer
from flex_trainer.activations.context import current_scope
from flex_trainer.config import FlexConfig
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.runtime_steps import LIMIT_BYTES, assert_equal, attached, gradients, loss_of, plain_gradients, step
from tests.trainer_runs import make


def inner_loss(model: Any, seed: int) -> torch.Tensor:
    """The inner model and the head, as a loss of one's own calls them."""
    batch = tiny_batch(model, 2, 64, seed=seed)
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden)
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def expected_gradients(*seeds: int) -> dict[str, torch.Tensor]:
    reference = tiny_model("mixtral")
    for seed in seeds:
        inner_loss(reference, seed).backward()
    return gradients(reference)


def test_a_loss_that_calls_the_inner_model_and_the_head(model: PreTrainedModel) -> None:
    runtime = attached(model, FlexConfig(BASE_BYTES + 1_600_000, ("recompute",)))
    for seed in range(3):
        loss = inner_loss(model, seed)
        assert current_scope() is None
        (one,) = runtime.in_flight
        # One micro-batch, from the first layer to the head; its forward ends where something else begins.
        assert not one.is_forward_done and one.entered is not None
        assert {"model.layers.0", "model.norm", "lm_head"} <= one.entered
        with runtime.backward():
            assert one.is_forward_done and one.actual_bytes > 0
            loss.backward()
        assert_equal(gradients(model), expected_gradients(seed))
    assert [record.micro_batch for record in runtime.records] == [0, 1, 2]
    assert [record.is_profile for record in runtime.records] == [True, False, False]
    assert not any(record.is_over_limit for record in runtime.records)
    last = runtime.records[-1]
    assert last.num_tokens == 128 and last.is_spike and last.freed_bytes["recompute"] > 0
    assert abs(last.predicted_bytes - last.actual_bytes) <= 0.02 * last.actual_bytes
    assert runtime.in_flight == [] and runtime.books.budgets.in_flight_bytes == 0


def test_a_backward_outside_of_the_context_ends_the_forward_first(model: PreTrainedModel) -> None:
    runtime = attached(model, FlexConfig(BASE_BYTES + 50_000_000))
    for seed in range(2):
        inner_loss(model, seed).backward()
        (one,) = runtime.in_flight
        assert one.is_over and one.actual_bytes > 0
    assert_equal(gradients(model), expected_gradients(0, 1))
    runtime.detach()
    assert [record.micro_batch for record in runtime.records] == [0, 1]
    assert runtime.records[0].demand_bytes == runtime.records[1].demand_bytes == runtime.records[1].actual_bytes
    assert runtime.part().forecast.refusal is None  # what an operator was called with says nothing about the model


def test_both_doors_in_one_run(model: PreTrainedModel) -> None:
    runtime = attached(model)
    inner_loss(model, 9)  # thrown away
    assert_equal(step(runtime, model, 1), plain_gradients(1))
    first, second = inner_loss(model, 2), inner_loss(model, 3)  # the second begins where the first operator comes again
    assert len(runtime.in_flight) == 2
    with runtime.backward():
        (first + second).backward()
    both = tiny_model("mixtral")
    (inner_loss(both, 2) + inner_loss(both, 3)).backward()
    assert_equal(gradients(model), gradients(both))
    assert [record.micro_batch for record in runtime.records] == [1, 2, 3]
    with torch.no_grad():
        inner_loss(model, 4)
    assert runtime.in_flight == [] and runtime.mark().num_micro_batches == 4


def test_an_operator_that_fails_leaves_nothing_behind(model: PreTrainedModel) -> None:
    runtime = attached(model)

    def refuse(*_: Any) -> None:
        raise ArithmeticError("forward is cursed")

    handle = model.model.layers[2].mlp.register_forward_hook(refuse)
    with pytest.raises(ArithmeticError):
        inner_loss(model, 1)
    handle.remove()
    assert runtime.in_flight == [] and current_scope() is None and not runtime.books.activities.is_any_at_work
    loss = inner_loss(model, 1)
    with runtime.backward():
        loss.backward()
    assert_equal(gradients(model), expected_gradients(1))
    runtime.detach()
    loss_of(model, 1).backward()
    assert len(runtime.records) == 1


class Distilled(nn.Module):
    """Holds student and teacher; only their own forwards are called."""

    def __init__(self) -> None:
        super().__init__()
        self.student = tiny_model("mixtral")
        self.teacher = tiny_model("llama", num_hidden_layers=1).requires_grad_(False)
        self.config = self.student.config

    def forward(self, **inputs: Any) -> Any:
        return self.student(**inputs)


def distillation_loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model.student(**inputs)
    with torch.no_grad():
        teacher = model.teacher(input_ids=inputs["input_ids"]).logits
    return output.loss + (output.logits - teacher).square().mean()


def test_a_wrapper_that_holds_student_and_teacher() -> None:
    model, reference = Distilled(), Distilled()
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 1_600_000, ("recompute",)))
    with_fake_meter(runtime)
    runtime.attach(model)
    for seed in range(3):
        inputs = tiny_batch(model.student, 2, 64, seed=seed)
        loss, expected = distillation_loss(model, inputs), distillation_loss(reference, inputs)
        assert torch.equal(loss, expected)
        with runtime.backward():
            loss.backward()
        expected.backward()
        assert_equal(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            {name: p.grad for name, p in reference.named_parameters() if p.grad is not None},
        )
    runtime.detach()
    assert [record.micro_batch for record in runtime.records] == [0, 1, 2]
    assert not any(record.is_over_limit for record in runtime.records)
    assert all(record.freed_bytes["recompute"] > 0 for record in runtime.records)


def test_a_trainer_with_a_loss_of_its_own(tmp_path: Any) -> None:
    class Own(FlexTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
            return cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), inputs["labels"].flatten())

    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES, ("recompute",)), trainer_class=Own, max_steps=2)
    trainer.train()
    records = trainer.flex.records
    assert [record.micro_batch for record in records] == list(range(4)) and [r.step for r in records] == [0, 0, 1, 1]
    assert not any(record.is_over_limit for record in records) and all(record.peak_bytes for record in records)
