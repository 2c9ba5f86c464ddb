"""Whole layers run again: what they hold, what their routers decided, and when they are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from flex_trainer import FlexConfig, FlexRuntime
from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.models.discovery import discover
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction, assert_same_step, instrumented, train_step
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.tiers import first_quick

KEEP, RECOMPUTE, OFFLOAD = Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD


def layers(site: Site) -> Strategy:
    return RECOMPUTE if site.kind == "layer" else KEEP


def within_layers(site: Site) -> Strategy:
    return RECOMPUTE if site.layer >= 0 and site.kind != "layer" else KEEP


def batch_of(model: PreTrainedModel, length: int = 32) -> dict[str, Any]:
    return {**tiny_batch(model, 2, length), "use_cache": False}


def test_a_layer_holds_its_input_and_what_its_router_gave():
    model = tiny_model("mixtral", num_hidden_layers=4)
    batch = batch_of(model)
    stream_bytes = 2 * 32 * model.config.hidden_size * 4
    with instrumented(model):
        kept = train_step(model, batch, lambda site: KEEP)
        within = train_step(model, batch, within_layers)
        by_layer = train_step(model, batch, layers)
    outside_bytes = kept.forward_held_bytes - sum(
        value.num_bytes
        for value in kept.trace.values
        if value.savers and value.owner >= 0 and kept.trace.calls[value.owner].site.layer >= 0
    )
    routing_bytes = sum(
        value.num_bytes
        for value in by_layer.trace.values
        if value.owner >= 0 and by_layer.trace.calls[value.owner].site.is_router
    )
    # Each layer's output is the next one's input, or the final norm's.
    assert by_layer.forward_held_bytes <= outside_bytes + 5 * stream_bytes + routing_bytes
    assert by_layer.forward_held_bytes - outside_bytes < 0.75 * (within.forward_held_bytes - outside_bytes)
    assert by_layer.ledger.num_recomputes == 4


def test_layers_are_brought_back_one_at_a_time():
    """The output of a layer is held, so the next one's recomputation does not begin with all those below it."""
    model = tiny_model("mixtral", num_hidden_layers=6)
    batch = batch_of(model)
    with instrumented(model):
        kept_bytes = train_step(model, batch, lambda site: KEEP).forward_held_bytes
        ledger = Ledger()
        most_bytes = 0

        def sample() -> None:
            nonlocal most_bytes
            most_bytes = max(most_bytes, ledger.recovered_bytes)

        scope = Scope(
            ByFunction(layers), ledger, parameters=list(model.parameters()), min_mitigated_bytes=1, on_memory=sample
        )
        with scope.open():
            loss = model(**batch).loss
        held_bytes = ledger.held_bytes
        loss.backward()
    assert 0 < most_bytes < 2 * (kept_bytes - held_bytes) / 6


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_decision_that_would_be_another_one_is_not_made_twice(architecture: str):
    """A router that never gives the same twice: the recomputation sees what forward saw."""
    model = tiny_model(architecture)
    batch = batch_of(model)
    runs = 0

    def restless(module: torch.nn.Module) -> None:
        forward = module.forward

        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            return forward(hidden_states * (1 + 0.5 * runs), *args, **kwargs)

        module.forward = run  # type: ignore[method-assign]

    routers = [operator.module for operator in discover(model).operators if operator.site.is_router]
    for router in routers:
        restless(router)
    with instrumented(model):
        train_step(model, batch, lambda site: KEEP)  # sees that layers can be run again
        runs = 0
        plain = train_step(model, batch, lambda site: KEEP)
        assert runs == len(routers)
        runs = 0
        step = train_step(model, batch, layers)
    assert runs == 2 * len(routers) and step.ledger.num_recomputes == model.config.num_hidden_layers
    assert torch.equal(step.loss, plain.loss)
    # What the routers save of their own inputs is made again, here with another factor; it is of no matter to others in
    # the last layer.
    last = f"layers.{model.config.num_hidden_layers - 1}."
    experts = [name for name in plain.gradients if last in name and "experts" in name]
    assert experts
    for name in experts:
        assert torch.equal(step.gradients[name], plain.gradients[name]), name


def test_results_that_are_written_into_afterwards_are_made_again():
    model = tiny_model("mixtral")
    batch = batch_of(model)
    for layer in model.model.layers:
        router, mlp = layer.mlp.gate, layer.mlp

        def route(hidden_states: torch.Tensor, forward: Any = router.forward) -> Any:
            return forward(hidden_states)

        router.forward = route
        original = mlp.experts.forward

        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, forward: Any = original) -> Any:
            return forward(hidden, index, weights.mul_(2.0))

        mlp.experts.forward = experts
    plain = train_step(model, batch)
    with instrumented(model):
        train_step(model, batch, lambda site: KEEP)
        step = train_step(model, batch, layers)
    assert step.ledger.num_recomputes > 0
    assert_same_step(step, plain)


class TestLayersThatCannotBeRunTwice:
    def test_one_that_writes_into_a_buffer(self):
        model = tiny_model("mixtral")
        batch = batch_of(model)
        counted = model.model.layers[0]
        counted.register_buffer("num_calls", torch.zeros(()))
        forward = counted.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted.num_calls += 1
            return forward(*args, **kwargs)

        counted.forward = counting
        plain = train_step(model, batch)
        with instrumented(model) as model_map:
            for _ in range(3):
                step = train_step(model, batch, layers)
                assert_same_step(step, plain)
        assert model_map.repeatable == {f"model.layers.{n}": n > 0 for n in range(model.config.num_hidden_layers)}
        assert counted.num_calls == 4
        assert step.ledger.num_recomputes == model.config.num_hidden_layers - 1

    def test_one_that_writes_into_its_input(self):
        model = tiny_model("mixtral")
        batch = batch_of(model)
        last = model.model.layers[-1]
        forward = last.forward

        def writing(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = forward(hidden_states * 1.0, *args, **kwargs)
            with torch.no_grad():
                hidden_states.view(-1)[:0].add_(1.0)  # nothing changes but the version
            return result

        last.forward = writing
        plain = train_step(model, batch)
        with instrumented(model):
            for _ in range(2):
                step = train_step(model, batch, layers)
                assert_same_step(step, plain)
        assert step.ledger.num_recomputes == model.config.num_hidden_layers - 1

    def test_one_that_fills_a_cache(self):
        model = tiny_model("mixtral")
        batch = {**batch_of(model), "use_cache": True}
        plain = train_step(model, batch)
        with instrumented(model):
            for _ in range(2):
                step = train_step(model, batch, layers)
                assert_same_step(step, plain)
        assert step.ledger.num_recomputes == 0


@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_a_forward_that_is_dropped_is_freed(kind: str):
    """Also where layers hand on tensors in an object, as Gemma 4 does with keys and values."""
    types = ["sliding_attention", "full_attention"] * 2
    model = tiny_model("gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, layer_types=types)
    batch = batch_of(model)

    def choose(site: Site) -> Strategy:
        return RECOMPUTE if site.kind == kind else KEEP

    plain = train_step(model, batch)
    with instrumented(model):
        train_step(model, batch, lambda site: KEEP)
        ledger = Ledger()
        scope = Scope(ByFunction(choose), ledger, parameters=list(model.parameters()), min_mitigated_bytes=1)
        with scope.open():
            loss = model(**batch).loss
        assert ledger.held_bytes > 0
        del loss
        assert ledger.held_bytes == 0
        assert_same_step(train_step(model, batch, choose), plain)


def test_a_layer_that_fails_after_its_router_is_freed():
    model = tiny_model("mixtral")
    batch = batch_of(model)

    def fail(*_: Any) -> None:
        raise MemoryError

    with instrumented(model):
        train_step(model, batch, lambda site: KEEP)
        model.model.layers[1].mlp.experts.register_forward_hook(fail)
        scope = Scope(ByFunction(layers), Ledger(), parameters=list(model.parameters()), min_mitigated_bytes=1)
        with pytest.raises(MemoryError), scope.open():
            model(**batch)
    assert scope.ledger.held_bytes == 0


@pytest.mark.parametrize("architecture", ["deepseek_v3", "dots1", "granitemoe"])
def test_numbers_of_experts_that_no_one_saves_are_not_predicted(architecture: str):
    """Indices of branches that die within a router (the best groups of experts) are no decisions."""
    model = tiny_model(architecture)
    with instrumented(model):
        trace = train_step(model, batch_of(model), lambda site: KEEP).trace
    routers = {index for index, call in enumerate(trace.calls) if call.site.is_router}
    unsaved = [value for value in trace.values if value.owner in routers and value.is_decision and not value.savers]
    assert len(unsaved) <= 3 * len(routers)  # what they give: logits, weights, choices


def test_what_transformers_captures_is_no_reason_to_keep_a_layer():
    """Its hook on the routers only looks, stays for good once it was asked for, and is of a known library."""
    model = tiny_model("mixtral")
    batch = {**batch_of(model), "output_router_logits": True}
    plain = train_step(model, batch)
    assert all(layer.mlp.gate._forward_hooks for layer in model.model.layers)
    with instrumented(model):
        for _ in range(2):
            step = train_step(model, batch, layers)
            assert_same_step(step, plain)
    assert step.ledger.num_recomputes == model.config.num_hidden_layers


def test_a_router_that_runs_more_often_the_second_time_is_an_error():
    model = tiny_model("mixtral")
    batch = batch_of(model)
    block = model.model.layers[0].mlp
    forward = block.forward
    is_second = False

    def twice(hidden_states: torch.Tensor) -> Any:
        if is_second:
            block.gate(hidden_states.view(-1, hidden_states.size(-1)))
        return forward(hidden_states)

    block.forward = twice
    with instrumented(model):
        train_step(model, batch, layers)
        scope = Scope(ByFunction(layers), Ledger(), parameters=list(model.parameters()), min_mitigated_bytes=1)
        with scope.open():
            loss = model(**batch).loss
        is_second = True
        with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.gate runs more often in a recomputation"):
            loss.backward()


def test_backward_may_come_after_the_model_is_given_back():
    model = tiny_model("qwen3_moe")
    batch = batch_of(model)
    plain = train_step(model, batch)
    instrumentation = Instrumentation(model, discover(model))
    for _ in range(2):  # the first shows that layers can be run again
        model.zero_grad(set_to_none=True)
        scope = Scope(
            ByFunction(layers),
            Ledger(),
            parameters=list(model.parameters()),
            modules=dict(model.named_modules()),
            min_mitigated_bytes=1,
        )
        with scope.open():
            loss = model(**batch).loss
    instrumentation.remove()
    loss.backward()
    assert scope.ledger.num_recomputes == model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, plain.gradients[name]), name


def test_a_layer_whose_router_is_offloaded():
    model = tiny_model("qwen3_moe")
    batch = batch_of(model)
    plain = train_step(model, batch)
    with instrumented(model):
        train_step(model, batch, lambda site: KEEP)
        kept = train_step(model, batch, layers)
        moved = train_step(
            model,
            batch,
            lambda site: OFFLOAD if site.is_router else layers(site),
            store=OffloadStore(FileTier()),
        )
    assert_same_step(moved, plain)
    assert moved.ledger.freed_bytes["offload"] > 0
    assert moved.forward_held_bytes < kept.forward_held_bytes


def test_plans_recompute_layers_from_the_first_micro_batch_on_where_nothing_else_fits():
    """What a trace on shapes finds out of a layer holds in the first real forward. Predicted is held, to the byte."""
    model = tiny_model("mixtral", num_hidden_layers=12)
    batch = batch_of(model, 64)

    def peak_bytes(share: float) -> tuple[list[Any], FlexRuntime]:
        runtime = FlexRuntime(FlexConfig(memory_limit=BASE_BYTES + int(share), strategies=("recompute",)))
        with_fake_meter(runtime)
        runtime.attach(model)
        plans = []
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            plans.append(runtime.in_flight[0].plan)
            with runtime.backward():
                loss.backward()
        runtime.detach()
        return plans, runtime

    plans, _ = peak_bytes(10**9)
    ample = plans[0]
    plans, runtime = peak_bytes(0.42 * ample.peak_bytes)
    first = runtime.records[0]
    assert any(name.count(".") == 2 for name in plans[0].strategies), sorted(plans[0].strategies)
    assert not first.is_profile
    assert first.predicted_bytes == pytest.approx(first.actual_bytes, rel=0.01)
    assert first.actual_bytes < 0.42 * ample.peak_bytes


@pytest.mark.parametrize("when", first_quick(["a hook after", "before", "after", "another module", "a hook before"]))
def test_code_with_effects_is_not_run_again(when: str):
    """Recorded choices that a patched router hands out by call order, as in reinforcement learning: one a forward."""
    model = tiny_model("mixtral", num_hidden_layers=12)
    batch = batch_of(model, 64)
    handed_out = [0] * 12

    def patch() -> None:
        for number, layer in enumerate(model.model.layers):
            gate = layer.mlp.gate

            def route(*args: Any, forward: Any = gate.forward, number: int = number, **kwargs: Any) -> Any:
                handed_out[number] += 1
                return forward(*args, **kwargs)

            gate.forward = route

    def run(runtime: FlexRuntime) -> None:
        model.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        with runtime.backward():
            loss.backward()

    class Replay(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module, number: int) -> None:
            super().__init__()
            self.inner, self.number = inner, number

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            handed_out[self.number] += 1
            return self.inner(*args, **kwargs)

    def hook() -> None:
        for number, layer in enumerate(model.model.layers):

            def hand_out(module: torch.nn.Module, args: Any, output: Any, number: int = number) -> Any:
                handed_out[number] += 1
                return output

            layer.mlp.gate.register_forward_hook(hand_out)

    def exchange() -> None:
        for number, layer in enumerate(model.model.layers):
            layer.mlp = Replay(layer.mlp, number)

    change = hook if "hook" in when else exchange if when == "another module" else patch
    is_before = when.endswith("before")
    if is_before:
        change()
    runtime = FlexRuntime(FlexConfig(memory_limit=BASE_BYTES + 10**9, strategies=("recompute",)))
    with_fake_meter(runtime)
    runtime.attach(model)
    for _ in range(2):  # the first may run with all recomputed
        run(runtime)
    peak_bytes = runtime.records[-1].peak_bytes - BASE_BYTES
    runtime.detach()
    handed_out[:] = [0] * 12
    runtime = FlexRuntime(FlexConfig(memory_limit=BASE_BYTES + int(0.75 * peak_bytes), strategies=("recompute",)))
    with_fake_meter(runtime)
    runtime.attach(model)
    if not is_before:
        run(runtime)
        change()
    for _ in range(3):
        run(runtime)
    assert runtime.records[-1].freed_bytes["recompute"] > 0
    runtime.detach()
    assert handed_out == [3] * 12
