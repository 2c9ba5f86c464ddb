"""Known faults of memory that grows and of peaks that move: routing, lengths, caches, accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from flex_trainer.activations.context import current_scope
from flex_trainer.activations.ledger import Ledger
from flex_trainer.callbacks.values import flex_logs
from flex_trainer.config import FlexConfig
from flex_trainer.models.discovery import discover
from flex_trainer.models.routing import Routing
from flex_trainer.provision.gradients import Gradients
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.faults.live_bytes import LiveMeter, live_bytes
from tests.runtime_steps import without_forecast
from tests.trainer_runs import make

Attach = Callable[..., FlexRuntime]


def small(architecture: str = "qwen3_moe", **options: Any) -> Any:
    return tiny_model(architecture, num_hidden_layers=2, **options)


@pytest.fixture
def attach() -> Iterator[Attach]:
    made: list[FlexRuntime] = []

    def make(model: Any, limit_bytes: int = 10**9, strategies: tuple[str, ...] = ("recompute",), **more: Any) -> Any:
        made.append(FlexRuntime(FlexConfig(limit_bytes, strategies, **more)))
        with_fake_meter(made[-1])
        made[-1].attach(model)
        return made[-1]

    yield make
    for one in made:
        one.detach()


def step(runtime: FlexRuntime, model: Any, seed: int = 0, length: int = 16, **more: Any) -> None:
    loss = model(**tiny_batch(model, 2, length, seed=seed), use_cache=False, **more).loss
    with runtime.backward():
        loss.backward()
    model.zero_grad(set_to_none=True)


# 1, 2: tokens of each expert


def send_to(model: Any, experts: int) -> None:
    """Make the router prefer the first `experts` experts, whatever the token."""
    gate = model.model.layers[1].mlp.gate
    gate.weight.data.zero_()
    preference = torch.arange(8, 0, -1).float()
    preference[experts:] = -100.0

    def prefer(module: Any, args: Any) -> Any:
        # A direction that all tokens share, so that the weights can speak to it.
        hidden = args[0].clone()
        hidden[..., 0] = 1.0
        return (hidden, *args[1:])

    if not gate._forward_pre_hooks:
        gate.register_forward_pre_hook(prefer)
    gate.weight.data[:, 0] = preference


def test_imbalance_is_that_of_this_micro_batch_while_routing_drifts(attach: Attach) -> None:
    """1: the router drifts from two experts for all to itself. Each record tells the counts of its own micro-batch."""
    model = small()
    runtime = attach(model)
    gate = model.model.layers[1].mlp.gate
    original = gate.weight.data.clone()
    seen: list[float] = []

    def count(module: Any, args: Any) -> None:
        index = next(t for t in args if isinstance(t, torch.Tensor) and not t.is_floating_point())
        counts = torch.bincount(index.flatten(), minlength=8).float()
        seen.append(float(counts.max() / counts.mean()))

    model.model.layers[1].mlp.experts.register_forward_pre_hook(count)
    for number in range(5):
        gate.weight.data.copy_(original)
        if number < 3:
            send_to(model, experts=2)
            gate.weight.data[2:, 0] += 60.0 * number  # from "never" to "nearly"
        step(runtime, model, seed=number)
    recorded = [record.imbalance for record in runtime.records]
    assert recorded == pytest.approx(seen) and recorded[0] == pytest.approx(4.0) and recorded[-1] < 4.0


def test_a_rank_that_gets_more_rows_plans_again_and_its_neighbour_does_not(attach: Attach) -> None:
    """1, 2: two ranks with the same plan. One gets three times the rows it planned for, as under expert parallelism
    with an untrained router: it alone plans again, after the counts and within its budget."""
    results = []
    for rows_factor in (1, 3):
        model = small()
        runtime = attach(model, BASE_BYTES + 700_000)
        for seed in range(2):
            step(runtime, model, seed)
        original = runtime.part().revise

        def revise(running: Any, site: Any, routing: Routing, original: Any = original, k: int = rows_factor) -> None:
            original(running, site, replace(routing, num_pairs=routing.num_pairs * k))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime.part(), "revise", revise)
            step(runtime, model, 2)
        results.append(runtime.records[-1])
    even, crowded = results
    assert (even.num_replans, crowded.num_replans) == (0, 1)
    # It expects more, and mitigates at least as much.
    assert crowded.predicted_peak_bytes > even.predicted_peak_bytes or (
        crowded.freed_bytes["recompute"] > even.freed_bytes["recompute"]
    )
    assert crowded.actual_bytes <= even.actual_bytes


def test_all_tokens_to_two_experts_in_the_first_steps(attach: Attach) -> None:
    """2: an untrained router that sends every token to the same experts: gradients as in plain training, nothing
    over the limit, and the imbalance is told."""
    model, reference = small(), small()
    send_to(model, experts=2)
    send_to(reference, experts=2)
    runtime = attach(model, BASE_BYTES + 700_000)
    for seed in range(3):
        loss = model(**tiny_batch(model, 2, 24, seed=seed), use_cache=False).loss
        with runtime.backward():
            loss.backward()
        expected = reference(**tiny_batch(reference, 2, 24, seed=seed), use_cache=False).loss
        expected.backward()
        assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
    assert [record.imbalance for record in runtime.records] == pytest.approx([4.0] * 3)
    assert not any(record.is_over_limit for record in runtime.records)


# 3: memory outside of the decoder layers


@pytest.mark.parametrize("has_auxiliary_loss", [False, True])
def test_memory_of_auxiliary_loss_logits_and_cross_entropy_is_in_the_plan(has_auxiliary_loss: bool) -> None:
    """3: with output_router_logits the auxiliary loss builds masks over all layers at once, and logits and cross-
    entropy stand beside them. From the second micro-batch of a length on, the predicted peak covers the real
    one."""
    model = small("mixtral", output_router_logits=has_auxiliary_loss)
    runtime = FlexRuntime(FlexConfig(10**9, ()))
    meter = LiveMeter(runtime)
    runtime.use_meter(meter)
    with live_bytes(has_peak=True) as live:
        meter.live = live
        runtime.attach(model)
        for seed in range(4):
            step(runtime, model, seed, length=48, output_router_logits=has_auxiliary_loss)
        runtime.detach()
    last = runtime.records[-1]
    assert abs(last.predicted_bytes - last.actual_bytes) <= 0.01 * last.actual_bytes
    assert last.predicted_peak_bytes >= 0.97 * last.peak_bytes


def test_logits_and_loss_are_sites_of_their_own(attach: Attach) -> None:
    """3: head and loss are operators that a plan and a report can name."""
    model = small()
    runtime = attach(model)
    loss = model(**tiny_batch(model, 2, 16), use_cache=False).loss
    (micro_batch,) = runtime.in_flight
    assert micro_batch.scope is not None
    trace = micro_batch.scope.trace
    outside = {call.site.name: index for index, call in enumerate(trace.calls) if call.site.layer == -1}
    assert {"model.norm", "lm_head", "loss"} <= outside.keys()
    logits_bytes = 2 * 16 * 384 * 4
    made = [value.num_bytes for value in trace.values if value.owner in (outside["lm_head"], outside["loss"])]
    assert sum(made) >= logits_bytes
    del loss, trace, micro_batch


# 4: lengths


def test_a_batch_eight_times_longer_than_any_before_is_not_run_on_a_shorter_ones_plan(attach: Attach) -> None:
    """4: batches grouped by length, then one far longer: it gets a plan of its own that covers it, under the limit."""
    model = small()
    runtime = attach(model, BASE_BYTES + 1_500_000)
    for seed, length in enumerate((8, 10, 12, 9, 96)):
        step(runtime, model, seed, length)
    *short, long = runtime.records
    assert long.demand_bytes > 6 * max(record.demand_bytes for record in short)
    assert not long.is_over_limit
    assert long.is_profile or long.predicted_bytes >= long.actual_bytes
    assert long.freed_bytes["recompute"] > 0
    # And back: the short ones are as free as before.
    step(runtime, model, 9, 9)
    assert sum(runtime.records[-1].freed_bytes.values()) == 0


# 5, 6: what stays


def test_a_model_that_keeps_a_tensor_of_each_step_is_seen(attach: Attach) -> None:
    """5: a dispatcher that keeps tensors of finished steps as attributes. The engine holds nothing of them, and
    what the model holds shows as a baseline that rises and a budget that falls by as much."""
    model = small()
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 20_000_000, ("recompute",)))
    meter = LiveMeter(runtime)
    runtime.use_meter(meter)
    kept: list[torch.Tensor] = []
    model.model.layers[1].mlp.experts.register_forward_hook(
        lambda module, args, output: kept.append(output.detach() * 1)
    )
    with live_bytes() as live:
        meter.live = live
        runtime.attach(model)
        for seed in range(4):
            step(runtime, model, seed)
        runtime.detach()
    kept_bytes = kept[0].numel() * 4
    baselines = [record.baseline_bytes for record in runtime.records]
    for earlier, later in zip(baselines, baselines[1:], strict=False):
        assert kept_bytes <= later - earlier <= kept_bytes + 4096
    # The first peak that is measured corrects the transients of all later plans.
    budgets = [record.budget_bytes for record in runtime.records[1:]]
    assert all(later < earlier for earlier, later in zip(budgets, budgets[1:], strict=False))


class Cursed(Exception):
    pass


def curse(*_: Any) -> None:
    raise Cursed


def is_cursed(function: Callable[[], Any]) -> bool:
    """Not pytest.raises, which would keep the frames, and with them the tensors."""
    try:
        function()
    except Cursed:
        return True
    return False


def backward_pass(runtime: FlexRuntime, model: Any) -> None:
    loss = model(**tiny_batch(model, 2, 16)).loss
    with runtime.backward():
        loss.backward()
    model.zero_grad(set_to_none=True)
    del loss


def no_grad_pass(runtime: FlexRuntime, model: Any) -> None:
    with torch.no_grad():
        model(**tiny_batch(model, 2, 16))


def abandoned_pass(runtime: FlexRuntime, model: Any) -> None:
    model(**tiny_batch(model, 2, 16))
    runtime._flight.forget(runtime.in_flight)


def error_in_a_layer(runtime: FlexRuntime, model: Any) -> None:
    handle = model.model.layers[1].mlp.register_forward_hook(curse)
    assert is_cursed(lambda: model(**tiny_batch(model, 2, 16)))
    handle.remove()


def error_in_an_operator(runtime: FlexRuntime, model: Any) -> None:
    handle = model.model.layers[1].self_attn.v_proj.register_forward_pre_hook(curse)
    assert is_cursed(lambda: model(**tiny_batch(model, 2, 16)))
    handle.remove()


class CursedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Cursed


def error_in_backward(runtime: FlexRuntime, model: Any) -> None:
    handle = model.model.embed_tokens.register_forward_hook(lambda m, a, output: CursedBackward.apply(output))
    loss = model(**tiny_batch(model, 2, 16)).loss

    def backward() -> None:
        with runtime.backward():
            loss.backward()

    assert is_cursed(backward)
    handle.remove()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("strategies", [("recompute",), ("offload",), ("quantize",)], ids=lambda names: names[0])
@pytest.mark.parametrize(
    "path",
    [backward_pass, no_grad_pass, abandoned_pass, error_in_a_layer, error_in_an_operator, error_in_backward],
    ids=lambda path: path.__name__,
)
def test_tables_are_empty_after_every_path(attach: Attach, path: Any, strategies: tuple[str, ...]) -> None:
    """6: whatever way a forward ends, nothing of it is alive afterwards, without the cyclic collector: no scope, no
    table, no micro-batch, no tensor. Batches of a kind that is not known yet run wholly under the strategy."""
    model = small()
    runtime = attach(model, strategies=strategies)
    without_forecast(runtime)
    step(runtime, model)  # modules with buffers, caches of positions: made once
    scopes: list[weakref.ref[Any]] = []
    was_known: list[bool] = []
    original = runtime._begin

    def begin(*args: Any) -> Any:
        micro_batch = original(*args)
        scopes.append(weakref.ref(micro_batch.scope))
        was_known.append(micro_batch.plan is not None)
        return micro_batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_begin", begin)
        with live_bytes() as live:
            path(runtime, model)
            assert live.now() < 4096
    assert current_scope() is None and runtime.running is None and runtime.in_flight == []
    assert was_known == ([] if path is no_grad_pass else [False])
    assert len(scopes) == (path is not no_grad_pass) and all(reference() is None for reference in scopes)
    assert runtime.books.budgets.in_flight_bytes == 0


def test_twenty_steps_of_the_trainer_leave_nothing_behind(tmp_path: Path) -> None:
    """5, 6, 19: whole training steps under plans that mitigate, long batches and short ones, without the cyclic
    collector: after each step nothing is held, and nothing of its micro-batches is alive."""
    config = FlexConfig(BASE_BYTES + 1_900_000, ("recompute", "offload"))
    sizes = tiny_model("deepseek_v3")

    def collate(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        number = samples[0]["number"]
        return tiny_batch(sizes, 2, (64, 40)[number % 2], seed=number)

    options = {"data_collator": collate}
    trainer = make(tmp_path, config, family="deepseek_v3", options=options, max_steps=20, gradient_accumulation_steps=1)
    runtime: FlexRuntime = trainer.flex
    scopes: list[weakref.ref[Any]] = []
    ledgers: list[Ledger] = []
    original = runtime._begin

    def begin(*args: Any) -> Any:
        micro_batch = original(*args)
        scopes.append(weakref.ref(micro_batch.scope))
        ledgers.append(micro_batch.ledger)
        return micro_batch

    left: list[tuple[int, int, int]] = []

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            held_bytes = sum(ledger.held_bytes + ledger.recovered_bytes for ledger in ledgers)
            left.append((held_bytes, sum(scope() is not None for scope in scopes), len(runtime.in_flight)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_begin", begin)
        trainer.add_callback(Look())
        trainer.train()
    assert left == [(0, 0, 0)] * 20 and len(ledgers) == 20
    assert sum(sum(record.freed_bytes.values()) for record in runtime.records) > 0


# 7: gradients under accumulation


def test_gradients_that_accumulation_keeps_are_in_the_budget(attach: Attach) -> None:
    """7: before the first backward all gradients are still to come and are planned for; under accumulation they
    stay, are part of what is in use, and only the largest of a layer is needed beside them; frozen ones never
    count."""
    model = small()
    model.model.layers[0].mlp.requires_grad_(False)
    gradients = Gradients(model, discover(model))
    trainable_bytes = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert sum(gradients.now().pending.values()) == trainable_bytes
    model(**tiny_batch(model, 2, 16)).loss.backward()
    now = gradients.now()
    assert sum(now.pending.values()) == 0 and sum(now.temporary.values()) > 0
    model.zero_grad(set_to_none=True)
    assert sum(gradients.now().pending.values()) == trainable_bytes


def test_the_first_micro_batch_of_a_step_plans_for_its_gradients(attach: Attach) -> None:
    """7: same batch, once with gradients to come and once with gradients there: the first has the higher predicted
    peak, by no more than all gradients."""
    model = small()
    runtime = attach(model)
    for seed in range(2):
        step(runtime, model, seed)
    for _ in range(2):  # the second accumulates onto the first
        loss = model(**tiny_batch(model, 2, 16), use_cache=False).loss
        with runtime.backward():
            loss.backward()
    first, second = runtime.records[-2:]
    gradient_bytes = sum(p.numel() * 4 for p in model.parameters())
    difference = first.predicted_peak_bytes - second.predicted_peak_bytes
    assert 0 < difference <= gradient_bytes


# 8: which peak


def test_the_peak_of_a_row_is_the_highest_with_its_index(attach: Attach) -> None:
    """8: of four micro-batches between two log rows the second is the longest: its peak is reported, with its index."""
    model = small()
    runtime = attach(model)
    for seed, length in enumerate((8, 48, 16, 8)):
        step(runtime, model, seed, length)
    peaks = [record.peak_bytes for record in runtime.records]
    row = flex_logs(runtime.records, runtime.limit_bytes)
    assert peaks.index(max(peaks)) == 1 == row["flex/memory/peak_micro_batch"]
    assert row["flex/memory/peak_gib"] == max(peaks) / 2**30 > peaks[-1] / 2**30
