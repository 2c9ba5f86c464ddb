"""One micro-batch from budget to backward, in every order of forwards and backwards."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from flex_trainer.activations.context import current_scope
from flex_trainer.config import FlexConfig
from flex_trainer.memory.enforce import enforce_process_limit, return_freed_memory
from flex_trainer.memory.process import process_memory, reset_peak_rss
from flex_trainer.models.routing import Routing
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.processes import run_in_subprocess
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES
from tests.runtime_steps import (
    LIMIT_BYTES,
    assert_equal,
    attached,
    gradients,
    loss_of,
    plain_gradients,
    step,
    without_forecast,
)
from tests.tiers import sweep_over


def test_profiles_first_and_plans_then(model: PreTrainedModel) -> None:
    runtime = attached(model)
    without_forecast(runtime)
    assert_equal(step(runtime, model), plain_gradients(0))
    assert_equal(step(runtime, model, 1), plain_gradients(1))
    first, second = runtime.records
    assert first.is_profile and not second.is_profile
    assert first.freed_bytes["recompute"] > second.freed_bytes["recompute"]
    assert sum(second.freed_bytes.values()) > 0


def test_two_forwards_before_one_backward(model: PreTrainedModel) -> None:
    runtime = attached(model, FlexConfig(BASE_BYTES + 3_600_000))
    step(runtime, model)
    total = loss_of(model, 1) + loss_of(model, 2)
    assert len(runtime.in_flight) == 2
    with runtime.backward():
        total.backward()
    assert_equal(gradients(model), plain_gradients(1, 2))
    assert [record.micro_batch for record in runtime.records] == [0, 1, 2]
    _, first, second = runtime.records
    # What the first holds is in use when the second starts: it has that much less.
    assert second.baseline_bytes == first.baseline_bytes + first.actual_bytes
    assert second.budget_bytes < first.budget_bytes - 0.9 * first.actual_bytes
    assert second.actual_bytes <= first.actual_bytes
    assert max(first.peak_bytes, second.peak_bytes) <= runtime.limit_bytes
    assert runtime.in_flight == []


def test_two_forwards_and_their_backwards_one_after_the_other(model: PreTrainedModel) -> None:
    runtime = attached(model, FlexConfig(BASE_BYTES + 3_600_000))
    first, second = loss_of(model, 1), loss_of(model, 2)
    with runtime.backward():
        second.backward()
    assert len(runtime.in_flight) == len(runtime.records) == 1
    with runtime.backward():
        first.backward()
    assert_equal(gradients(model), plain_gradients(2, 1))
    assert [record.micro_batch for record in runtime.records] == [1, 0]


def test_forward_without_backward_teaches_nothing(model: PreTrainedModel) -> None:
    runtime = attached(model)
    without_forecast(runtime)
    for seed in range(3):
        loss_of(model, seed)  # under grad, and thrown away: scoring without no_grad
    assert runtime.records == [] and len(runtime.in_flight) <= 1
    step(runtime, model)
    assert len(runtime.records) == 1 and runtime.records[0].is_profile
    assert runtime.in_flight == []


def test_retain_graph(model: PreTrainedModel) -> None:
    runtime = attached(model)
    step(runtime, model)
    loss = loss_of(model, 1)
    for _ in range(2):
        with runtime.backward():
            loss.backward(retain_graph=True)
    twice = {name: gradient * 2 for name, gradient in plain_gradients(1).items()}
    assert_equal(gradients(model), twice)
    # Its values are kept for a third backward: it is in flight, and holds what it holds.
    (kept,) = runtime.in_flight
    assert len(runtime.records) == 1 and 0 < kept.ledger.held_bytes <= kept.actual_bytes
    with runtime.backward():
        loss.backward()
    assert [record.micro_batch for record in runtime.records] == [0, 1] and runtime.in_flight == []
    assert kept.ledger.held_bytes == 0 and runtime.books.budgets.in_flight_bytes == 0
    assert_equal(gradients(model), plain_gradients(1))
    del loss
    assert_equal(step(runtime, model, 2), plain_gradients(2))


def test_backward_outside_of_the_context_is_noticed_at_the_next_forward(model: PreTrainedModel) -> None:
    runtime = attached(model)
    for seed in range(3):
        loss_of(model, seed).backward()
    assert len(runtime.records) == 2 and len(runtime.in_flight) == 1


def test_no_grad_is_left_alone(model: PreTrainedModel) -> None:
    runtime = attached(model)
    with torch.no_grad():
        loss_of(model)
    with torch.inference_mode():
        loss_of(model)
    assert runtime.records == [] and runtime.in_flight == []
    assert current_scope() is None


class Trouble(torch.autograd.Function):
    """The identity, until backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("backward is cursed")


def test_exception_in_backward_teaches_nothing(model: PreTrainedModel) -> None:
    runtime = attached(model)
    step(runtime, model)

    def embed(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return Trouble.apply(output)

    handle = model.get_input_embeddings().register_forward_hook(embed)
    loss = loss_of(model, 1)
    with pytest.raises(ArithmeticError, match="backward is cursed"), runtime.backward():
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    assert len(runtime.records) == 1 and runtime.in_flight == []
    assert_equal(step(runtime, model, 2), plain_gradients(2))
    assert [record.micro_batch for record in runtime.records] == [0, 2]


def test_exception_in_forward_leaves_nothing_behind(model: PreTrainedModel) -> None:
    runtime = attached(model)
    step(runtime, model)

    def refuse(*_: Any) -> None:
        raise ArithmeticError("forward is cursed")

    handle = model.model.norm.register_forward_pre_hook(refuse)
    with pytest.raises(ArithmeticError):
        loss_of(model, 1)
    handle.remove()
    assert current_scope() is None and runtime.running is None and runtime.in_flight == []
    assert_equal(step(runtime, model, 2), plain_gradients(2))
    assert len(runtime.records) == 2


def test_nothing_of_a_finished_step_is_held(model: PreTrainedModel) -> None:
    runtime = attached(model, FlexConfig(LIMIT_BYTES, ("recompute", "offload")))
    gc.collect()
    gc.disable()
    try:
        ledgers = []
        for seed in range(4):
            loss = loss_of(model, seed)
            ledgers.append(runtime.in_flight[0].ledger)
            with runtime.backward():
                loss.backward()
            del loss
        assert all(ledger.held_bytes == 0 and ledger.recovered_bytes == 0 for ledger in ledgers)
    finally:
        gc.enable()


def test_fewer_planned_rows_than_routed_makes_it_plan_again(model: PreTrainedModel) -> None:
    # Without expert parallelism rows are always tokens x top-k, so make the profile remember too few.
    runtime = attached(model)
    step(runtime, model)
    for known in runtime.part().profile._structures.values():
        for structure in known:
            assert len(structure.pairs_per_token) == 3
            structure.pairs_per_token = {name: rate / 2 for name, rate in structure.pairs_per_token.items()}
    assert_equal(step(runtime, model, 1), plain_gradients(1))
    assert runtime.records[1].num_replans == 3  # once in each layer
    assert runtime.records[1].predicted_peak_bytes > 0
    # What was seen is remembered: the next micro-batch is planned with the rows it gets.
    assert_equal(step(runtime, model, 2), plain_gradients(2))
    assert runtime.records[2].num_replans == 0


@pytest.mark.parametrize(("room_bytes", "is_tight"), [(3_400_000, True), (9_000_000, False)], ids=["tight", "ample"])
def test_more_held_than_predicted_makes_it_plan_again(model: PreTrainedModel, room_bytes: int, is_tight: bool) -> None:
    """Not where all may be kept all the same."""
    runtime = attached(model, FlexConfig(BASE_BYTES + room_bytes))
    step(runtime, model)
    extra = torch.ones(2, 64, 4096, requires_grad=True)
    kept = []

    def save_more(module: Any, args: Any, output: torch.Tensor) -> None:
        kept.append((extra * 2).exp())  # saved by autograd while the first layer's norm runs

    handle = model.model.layers[0].input_layernorm.register_forward_hook(save_more)
    assert_equal(step(runtime, model, 1), plain_gradients(1))
    handle.remove()
    assert (runtime.records[1].num_replans > 0) is is_tight


def test_a_finished_micro_batch_dies_at_once(model: PreTrainedModel) -> None:
    runtime = attached(model, FlexConfig(BASE_BYTES + 9_000_000))
    gc.collect()
    gc.disable()
    try:
        dead = []
        for seed in range(2):  # learnt
            loss = loss_of(model, seed)
            dead.append(weakref.ref(runtime.in_flight[0]))
            with runtime.backward():
                loss.backward()
            del loss
        loss_of(model, 2)  # forgotten when the next one starts
        dead.append(weakref.ref(runtime.in_flight[0]))
        step(runtime, model, 3)
        assert [reference() for reference in dead] == [None] * 3
    finally:
        gc.enable()


def test_the_window_ends_with_every_exception(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = attached(model)
    events: list[str] = []
    monkeypatch.setattr(runtime.books.meter, "end_window", lambda: events.append("end"))
    step(runtime, model)
    assert events == ["end"] and not runtime.books.activities.is_any_at_work

    def refuse(*_: Any, **__: Any) -> None:
        raise ArithmeticError("cursed")

    handle = model.model.norm.register_forward_pre_hook(refuse)
    with pytest.raises(ArithmeticError):
        loss_of(model)
    handle.remove()
    assert events == ["end"] * 2
    loss = loss_of(model)
    with pytest.raises(ArithmeticError), runtime.backward():
        refuse()
    assert events == ["end"] * 3
    with runtime.backward():  # the same loss, once more: its micro-batch is still known
        loss.backward()
    assert len(runtime.records) == 2 and runtime.in_flight == []
    assert events == ["end"] * 4  # its backward has a window of its own
    monkeypatch.setattr(runtime.part(), "begin", refuse)
    with pytest.raises(ArithmeticError):
        loss_of(model)
    assert events == ["end"] * 5 and not runtime.books.activities.is_any_at_work


@pytest.mark.parametrize("family", sweep_over(["deepseek_v3", "gpt_oss", "llama", "qwen3_5_moe"], quick=["gpt_oss"]))
def test_lengths_that_vary_stay_inside_the_limit(family: str) -> None:
    model, reference = tiny_model(family), tiny_model(family)
    # qwen3_5_moe keeps half of what it computes: its linear attention is no operator of its own.
    runtime = attached(model, FlexConfig(BASE_BYTES + (7_000_000 if family == "qwen3_5_moe" else 2_000_000)))
    for number, length in enumerate((32, 48, 80, 24, 70, 96, 17, 90)):
        loss, expected = loss_of(model, number, length), loss_of(reference, number, length)
        assert torch.equal(loss, expected)
        with runtime.backward():
            loss.backward()
        expected.backward()
        assert_equal(gradients(model), gradients(reference))
    assert not any(record.is_over_limit for record in runtime.records)
    assert sum(record.is_profile for record in runtime.records) <= 4
    for record in runtime.records:
        if not record.is_profile and family in ("gpt_oss", "llama"):
            assert abs(record.predicted_bytes - record.actual_bytes) <= 0.02 * record.actual_bytes


# Called in a fresh process by name.
def child_trains_under_a_cap() -> dict[str, Any]:
    """Plain training dies at a cap between what keeping all and recomputing all need; with the runtime it goes on."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return_freed_memory()
    model = tiny_model("mixtral", hidden_size=128, intermediate_size=128, num_hidden_layers=8, num_experts_per_tok=4)

    def plain_step(seed: int) -> float:
        loss = loss_of(model, seed, 512)
        loss.backward()
        model.zero_grad()
        return loss.item()

    def flex_step(runtime: FlexRuntime) -> None:
        runtime.attach(model)
        loss = loss_of(model, 0, 64)
        with runtime.backward():
            loss.backward()
        model.zero_grad()
        runtime.detach()

    losses = [plain_step(0)]
    flex_step(FlexRuntime(FlexConfig("64GiB", ("recompute",))))  # what is imported on first use takes memory as well
    reset_peak_rss()
    base_bytes = process_memory().rss_bytes
    losses.append(plain_step(1))
    needed_bytes = process_memory().peak_rss_bytes - base_bytes
    limit_bytes = base_bytes + int(0.6 * needed_bytes)
    enforce_process_limit(limit_bytes)
    refusal = ""
    try:
        plain_step(0)
    except RuntimeError as error:
        refusal = str(error)
    model.zero_grad()
    runtime = FlexRuntime(FlexConfig(limit_bytes, ("recompute",)))
    runtime.attach(model)
    flex_losses = []
    for seed in (0, 1, 0, 1):
        loss = loss_of(model, seed, 512)
        with runtime.backward():
            loss.backward()
        model.zero_grad()
        flex_losses.append(loss.item())
    return {
        "needed_bytes": needed_bytes,
        "limit_bytes": limit_bytes,
        "refusal": refusal,
        "losses": losses,
        "flex_losses": flex_losses,
        "peaks": [record.peak_bytes for record in runtime.records],
        "freed": [sum(record.freed_bytes.values()) for record in runtime.records],
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux caps all data memory")
def test_under_a_real_cap_plain_training_dies_and_flex_goes_on() -> None:
    result = run_in_subprocess(f"{__name__}:child_trains_under_a_cap", env={"OMP_NUM_THREADS": "1"})
    assert result.exit_code == 0, result.stderr
    value = result.value
    assert value["needed_bytes"] > 60 * 2**20  # enough for the cap to mean something
    assert "can't allocate memory" in value["refusal"]
    assert value["flex_losses"] == value["losses"] * 2
    assert all(freed > 0 for freed in value["freed"])
    assert max(value["peaks"]) <= value["limit_bytes"] + 8 * 2**20  # pages of files come on top of the cap


def test_a_trace_is_no_part_of_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its time nor its memory: it ends before the window, the plan and the clock begin."""
    runtime = attached(tiny_model("mixtral"))
    part, meter = runtime.part(), runtime.books.meter
    prepare, start_window = part.prepare, meter.start_window
    order: list[str] = []
    ended: list[float] = []

    def traced(*args: Any) -> float:
        prepare(*args)
        order.append("trace")
        ended.append(time.perf_counter())
        return 12.5

    monkeypatch.setattr(part, "prepare", traced)
    monkeypatch.setattr(meter, "start_window", lambda: (order.append("window"), start_window()))
    model = runtime.model
    assert isinstance(model, PreTrainedModel)
    loss = model(**tiny_batch(model, 1, 16)).loss
    with runtime.backward():
        loss.backward()
    record = runtime.records[-1]
    assert order == ["trace", "window", "window", "window"]  # one more for the loss, one for backward
    assert record.trace_ms == 12500
    assert record.plan_ms <= record.step_ms <= (time.perf_counter() - ended[0]) * 1e3


def test_all_that_the_planner_does_is_counted(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Looking a shape up, gradients, budget and plan, re-plans, and what is learnt afterwards."""
    runtime = attached(model, FlexConfig(LIMIT_BYTES * 2, ("recompute",)))
    step(runtime, model)
    part = runtime.part()
    slow = [
        (part.profile, "knows", 0.02), (part.profile, "observe", 0.04), (part.managed.gradients, "now", 0.03),
        (part.plans, "plan", 0.01), (runtime.books.correction, "observe", 0.03), (part.profile, "planned_pairs", 0.01),
        (part, "_is_as_planned", 0.01),
    ]  # fmt: skip
    num_calls: dict[str, int] = {}
    slept: list[float] = []
    for owner, name, seconds in slow:
        original = getattr(owner, name)

        def slowed(*args: Any, original: Any = original, name: str = name, seconds: float = seconds) -> Any:
            num_calls[name] = num_calls.get(name, 0) + 1
            slept.append(seconds)
            time.sleep(seconds)
            return original(*args)

        monkeypatch.setattr(owner, name, slowed)
    assert_equal(step(runtime, model, 1), plain_gradients(1))
    assert sum(slept) >= 0.15 and num_calls["observe"] == 2 and num_calls["_is_as_planned"] == 3
    assert runtime.records[-1].plan_ms >= 1e3 * sum(slept)
    assert num_calls["knows"] <= 2  # by the forecast, and for the plan; not for each of the routers


def test_copies_on_their_way_are_no_reason_to_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sources are held for a moment, and the plan does not count them."""
    from flex_trainer.memory.offloading import OffloadService

    for in_flight_bytes in (0, 5_000_000):
        runtime = attached(tiny_model("mixtral"), FlexConfig(LIMIT_BYTES * 2))
        revise = runtime.part().revise
        monkeypatch.setattr(OffloadService, "in_flight_bytes", property(lambda _, num=in_flight_bytes: num))

        def with_more_held(micro_batch: Any, site: Any, routing: Routing, revise: Any = revise) -> None:
            micro_batch.ledger.hold(5_000_000)
            revise(micro_batch, site, replace(routing, num_pairs=0))
            micro_batch.ledger.release(5_000_000)

        monkeypatch.setattr(runtime.part(), "revise", with_more_held)
        loss = loss_of(runtime.model)  # type: ignore[arg-type]
        with runtime.backward():
            loss.backward()
        assert bool(runtime.records[-1].num_replans) == (in_flight_bytes == 0)
        runtime.detach()
