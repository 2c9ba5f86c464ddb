"""What a choice of strategies holds: against an independent count, and against the engine on real models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.cost.compiled import CompiledSegment
from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import Timeline
from flex_trainer.models.discovery import discover
from flex_trainer.models.inputs import shape_of
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.cost_rules import evaluate
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.planner.graphs import graphs, held_by_brute_force
from tests.tiers import examples

KEEP, RECOMPUTE, OFFLOAD, QUANTIZE = Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE


@examples(200)
@given(graph=graphs(), seed=st.integers(0, 2**32))
def test_held_bytes_against_an_independent_count(graph: ActivationGraph, seed: int) -> None:
    draw, rates = random.Random(seed), Rates()
    for segment in graph.segments:
        choice = {i: draw.choice((KEEP, RECOMPUTE, OFFLOAD, QUANTIZE)) for i in range(len(segment.operators))}
        expected = held_by_brute_force(segment, choice, rates.smallest_moved_bytes)
        assert evaluate(segment, choice, rates).held_bytes == expected


def layer(*operators: Operator, values: tuple[Value, ...]) -> Segment:
    return Segment(0, operators, values)


def norm(name: str, *inputs: int, parent: int = -1, seconds: float = 1.0, kind: str = "norm") -> Operator:
    return Operator(Site(name, kind, 0, is_block=kind == "mlp"), parent, inputs, seconds, 0, 0)


def test_recompute_trades_what_it_made_for_its_input() -> None:
    segment = layer(norm("a", 0), values=(Value(-1, 100, ()), Value(0, 1000, (0,)), Value(0, 500, (-1,))))
    assert evaluate(segment, {}, Rates()).held_bytes == 1500
    cost = evaluate(segment, {0: RECOMPUTE}, Rates())
    assert cost.held_bytes == 100
    assert cost.added_seconds == pytest.approx(1.0 + Rates().recompute_overhead_seconds)
    assert cost.backward_bytes >= 1500


def test_what_is_not_needed_is_neither_held_nor_recomputed() -> None:
    segment = layer(norm("a", 0), values=(Value(-1, 100, ()), Value(0, 1000, ())))
    cost = evaluate(segment, {0: RECOMPUTE}, Rates())
    assert (cost.held_bytes, cost.added_seconds) == (0, 0.0)


def test_a_chain_of_recomputes_goes_back_to_the_first_input() -> None:
    operators = (norm("a", 0), norm("b", 1), norm("c", 2))
    values = (Value(-1, 7, ()), Value(0, 100, ()), Value(1, 100, ()), Value(2, 100, (2,)))
    cost = evaluate(layer(*operators, values=values), dict.fromkeys(range(3), RECOMPUTE), Rates())
    assert cost.held_bytes == 7
    assert cost.added_seconds == pytest.approx(3 * (1 + Rates().recompute_overhead_seconds))


def test_a_recomputed_block_overrides_the_operators_inside() -> None:
    operators = (norm("mlp", 0, kind="mlp", seconds=5.0), norm("mlp.act", 1, parent=0))
    values = (Value(-1, 10, (0,)), Value(0, 1000, (1,)), Value(1, 1000, (0,)))
    alone = evaluate(layer(*operators, values=values), {0: RECOMPUTE}, Rates())
    both = evaluate(layer(*operators, values=values), {0: RECOMPUTE, 1: OFFLOAD}, Rates())
    assert alone == both
    assert alone.held_bytes == 10


def test_a_recompute_never_saves_time() -> None:
    """Times are measured one by one, and those inside may come out longer than the block's."""
    segment = layer(
        norm("mlp", 0, kind="mlp", seconds=0.5),
        norm("a", 0, parent=0, seconds=0.1),
        norm("b", 1, parent=0, seconds=0.7),
        values=(Value(-1, 100, ()), Value(1, 1000, (1,)), Value(2, 500, ())),
    )
    cost = evaluate(segment, {0: RECOMPUTE}, Rates())
    assert cost.added_seconds == pytest.approx(Rates().recompute_overhead_seconds)
    compiled = CompiledSegment(segment, Rates()).evaluate(np.array([[1, 0, 0]]))
    assert compiled.seconds[0] == pytest.approx(cost.added_seconds)


def test_a_router_is_never_recomputed() -> None:
    site = Site("gate", "router", 0, is_recomputable=False)
    segment = layer(Operator(site, -1, (), 1.0, 0, 0), values=(Value(0, 50_000, (0,)),))
    assert evaluate(segment, {0: RECOMPUTE}, Rates()) == evaluate(segment, {}, Rates())


def test_only_floats_in_long_rows_are_quantized() -> None:
    def held(element_bytes: int, num_rows: int) -> int:
        values = (Value(0, 64_000, (0,), element_bytes, num_rows),)
        return evaluate(layer(norm("a"), values=values), {0: QUANTIZE}, Rates()).held_bytes

    assert held(8, 0) == held(1, 0) == 64_000
    assert held(4, 250) == 16_000 + 4 * 250
    assert held(2, 250) == 32_000 + 4 * 250
    assert held(2, 16_000) == 64_000  # rows of two: codes and scales would take more


def test_timeline_counts_transients_where_they_are() -> None:
    def segment(held: int, number: int) -> Segment:
        made = Operator(Site(str(number), "norm", number), -1, (), 1.0, output_bytes=30, input_bytes=20)
        return Segment(number, (made,), (Value(0, held, (-1,)),))

    segments = [segment(held, n) for n, held in ((0, 100), (1, 200), (-1, 1000))]
    timeline = Timeline([evaluate(one, {}, Rates()) for one in segments], segments)
    # What lies outside of the layers is there from the start.
    assert timeline.stacked().tolist() == [1100, 1300, 1300]
    assert timeline.peak().num_bytes == 1350
    assert timeline.peak().held_bytes == 1300


def test_copies_on_their_way_count_up_to_their_bound() -> None:
    site = Site("a", "norm", 0)
    made = Segment(0, (Operator(site, -1, (), 1.0, 0, 0),), (Value(0, 100_000, (-1,)),))
    segments = [made, replace(made, layer=1), replace(made, layer=-1)]
    costs = [evaluate(one, {} if one.layer < 0 else {0: OFFLOAD}, Rates()) for one in segments]
    recovered = 100_000
    for bound, in_flight in ((0, 0), (50_000, 50_000), (10**9, 200_000)):
        peak = Timeline(costs, segments, in_flight_bytes=bound).peak()
        assert peak.held_bytes == 100_000
        assert peak.num_bytes == max(100_000 + recovered + min(in_flight, 200_000), 100_000 + in_flight)


# Against the engine

# In the second group routers compute on branches that end in integers: autograd drops in forward what it saved there.
WITHOUT_DEAD_ENDS = ("mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "llama")
WITH_DEAD_ENDS = ("deepseek_v3", "dots1", "glm4_moe", "phimoe")
EXACT = (*WITHOUT_DEAD_ENDS, *WITH_DEAD_ENDS)


@dataclass
class Bench:
    """A model under the engine, without a runtime."""

    family: str

    def __post_init__(self) -> None:
        self.model = tiny_model(self.family)
        self.batch = tiny_batch(self.model, 2, 64)
        self.store = OffloadStore(FileTier(None))
        self.shape = shape_of((), self.batch)
        instrumentation = Instrumentation(self.model, discover(self.model))
        try:
            self.profile = Profile()
            scope, _ = self.forward({})
            self.trace = scope.trace
            self.profile.observe(self.shape, scope.trace, {})
            self.names = sorted({call.site.name for call in scope.trace.calls})
            self.held = [(plan, *self.forward(plan)) for plan in self.random_plans()]
        finally:
            instrumentation.remove()

    def forward(self, strategies: dict[str, Strategy]) -> tuple[Scope, int]:
        ledger = Ledger()
        parameters = [*self.model.parameters(), *self.model.buffers()]
        scope = Scope(Plan(strategies), ledger, parameters=parameters, store=lambda: self.store)
        with scope.open():
            output = self.model(**self.batch)
        self.store.settle()
        held_bytes = ledger.held_bytes
        del output
        assert ledger.held_bytes == 0
        return scope, held_bytes

    def random_plans(self) -> Iterator[dict[str, Strategy]]:
        draw = random.Random(0)
        yield {}
        for kinds in ((RECOMPUTE,), (OFFLOAD,), (RECOMPUTE, OFFLOAD)):
            yield dict.fromkeys(self.names, kinds[0])
            for share in (0.2, 0.5, 0.8):
                yield {name: draw.choice(kinds) for name in self.names if draw.random() < share}

    def predict(self, strategies: dict[str, Strategy]) -> int:
        graph = self.profile.graph(self.shape)
        costs = [
            evaluate(
                segment,
                {i: strategies[op.site.name] for i, op in enumerate(segment.operators) if op.site.name in strategies},
                Rates(),
            )
            for segment in graph.segments
        ]
        return Timeline(costs, graph.segments, shared_bytes=graph.shared_bytes).peak().held_bytes


@cache
def bench(family: str) -> Bench:
    torch.manual_seed(0)
    return Bench(family)


@pytest.mark.parametrize("family", EXACT)
def test_prediction_equals_what_the_engine_holds(family: str) -> None:
    measured = bench(family)
    errors = [(measured.predict(plan) - held) / held for plan, _, held in measured.held]
    assert max(abs(error) for error in errors) < 0.005
    assert sum(abs(error) for error in errors) / len(errors) < 0.001


@pytest.mark.parametrize("family", EXACT)
def test_trace_is_the_same_under_every_plan(family: str) -> None:
    measured = bench(family)
    for _, scope, _ in measured.held:
        assert [call.site for call in scope.trace.calls] == [call.site for call in measured.trace.calls]
        assert [call.inputs for call in scope.trace.calls] == [call.inputs for call in measured.trace.calls]
        assert scope.trace.values == measured.trace.values
