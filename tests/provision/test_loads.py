"""What the next micro-batch is expected to bring, when a plan is made anew in its middle, and the graph in between."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flex_trainer.cost.expected import EXPECTED, Expected, ep_block
from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.cost.load import EVEN, Load
from flex_trainer.models.routing import Routing
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.loads import Loads, RecentLoads
from flex_trainer.strategy import Site, Strategy

KEEP_ALL = Plan()
MITIGATES = Plan(added_seconds=0.1)


def experts(layer: int) -> Site:
    return Site(f"layers.{layer}.experts", "experts", layer, is_block=True)


def routing(
    pairs: float = 1.0,
    rows: float | None = None,
    tokens_ratio: float = 1.0,
    is_agreed: bool = False,
    is_acceptable: bool = False,
) -> Routing:
    """Of experts on several ranks; with as many rows as pairs, where nothing is said of rows."""
    load = Load(pairs, pairs if rows is None else rows)
    return Routing(
        num_pairs=100,
        count=lambda: None,
        load=load,
        tokens_ratio=tokens_ratio,
        is_recompute_agreed=is_agreed,
        is_recompute_acceptable=is_acceptable,
    )


def noted(*routings: Routing, expected: Expected = EXPECTED) -> Loads:
    """Layers 0, 1, ... have spoken."""
    loads = Loads(expected)
    for layer, one in enumerate(routings):
        loads.note(layer, one)
    return loads


def needs_replan(loads: Loads, layer: int, one: Routing, plan: Plan = KEEP_ALL) -> bool:
    """As the runtime asks."""
    loads.note(layer, one)
    return loads.needs_replan(experts(layer), one, plan, planned_pairs=None)


# From one micro-batch to the next


def test_before_anything_is_known_loads_are_even() -> None:
    recent = RecentLoads()
    assert recent.expected == EXPECTED == Expected(EVEN, frozenset())
    recent.learn(Loads())  # all experts are on one rank
    recent.learn(noted(routing(tokens_ratio=0.0)))  # no rank had a token
    assert recent.expected == EXPECTED


def test_what_is_expected_is_relative_to_the_mean_rank() -> None:
    recent = RecentLoads()
    recent.learn(noted(routing(2.0, 0.5, tokens_ratio=2.0)))
    assert recent.expected.load == Load(1.0, 0.25)


def test_of_the_layers_the_most_is_expected_in_steps() -> None:
    recent = RecentLoads()
    recent.learn(noted(routing(1.0, 0.9), routing(1.3, 0.5), routing(0.2, 0.2)))
    assert recent.expected.load == Load(1.375, 1.0)


def test_eight_micro_batches_are_remembered() -> None:
    recent = RecentLoads()
    recent.learn(noted(routing(4.0)))
    for _ in range(7):
        recent.learn(noted(routing(1.5)))
        assert recent.expected.load == Load(4.0, 4.0)
    recent.learn(noted(routing(1.5)))
    assert recent.expected.load == Load(1.5, 1.5)


def test_agreement_is_expected_where_the_last_one_could_have_had_it() -> None:
    recent = RecentLoads()
    recent.learn(noted(routing(is_acceptable=True), routing(), routing(is_acceptable=True, is_agreed=True)))
    assert recent.expected.agreed_layers == {0, 2}
    recent.learn(noted(routing(), routing(is_acceptable=True)))
    assert recent.expected.agreed_layers == {1}


# Inside one


def test_a_skew_is_planned_for_once() -> None:
    loads = Loads()
    assert needs_replan(loads, 0, routing(1.5))
    assert loads.expected.load == Load(1.5, 1.5)
    assert not needs_replan(loads, 1, routing(1.4))
    assert not needs_replan(loads, 2, routing(1.5))
    assert needs_replan(loads, 3, routing(1.0, 1.6))  # more rows with fewer pairs
    assert loads.expected.load == Load(1.5, 1.6)


def test_the_first_counts_say_how_many_tokens_there_are_on_all_ranks() -> None:
    loads = Loads()
    assert needs_replan(loads, 0, routing(0.9, tokens_ratio=1.3))
    assert loads.expected.load == Load(1.375, 1.375)  # of the layers to come too, though this one got less
    assert not needs_replan(loads, 1, routing(1.375, tokens_ratio=1.3))
    assert loads.tokens_ratio == 1.3


def test_far_fewer_tokens_are_planned_for_where_it_saves_time() -> None:
    few = routing(0.5, tokens_ratio=0.5)
    loads = Loads()
    assert needs_replan(loads, 0, few, MITIGATES)
    assert loads.expected.load == Load(0.5, 0.5)
    loads = Loads()
    assert not needs_replan(loads, 0, few, KEEP_ALL)
    assert loads.expected == EXPECTED
    assert not needs_replan(Loads(), 0, routing(0.75, tokens_ratio=0.75), MITIGATES)  # not so few


def test_growth_is_since_the_plan_in_force() -> None:
    loads = Loads(Expected(Load(1.25, 1.0)))
    assert loads.growth == 1.0
    needs_replan(loads, 0, routing(1.5, 1.0))
    needs_replan(loads, 1, routing(1.75, 1.5))
    assert loads.growth == pytest.approx(1.5)  # rows have grown by more than pairs
    loads.note_plan()
    assert loads.growth == 1.0
    needs_replan(loads, 2, routing(3.5, 1.0))
    assert loads.growth == pytest.approx(2.0)
    assert Loads(Expected(Load(0.0, 0.0))).growth == 1.0
    nothing_planned = Loads(Expected(Load(0.0, 0.0)))
    needs_replan(nothing_planned, 0, routing(0.5))
    assert nothing_planned.growth == math.inf


def test_expected_agreement_outlives_a_new_load() -> None:
    loads = Loads(Expected(EVEN, frozenset({1})))
    assert needs_replan(loads, 0, routing(2.0))
    assert loads.expected == Expected(Load(2.0, 2.0), frozenset({1}))


@pytest.mark.parametrize(
    ("strategy", "is_agreed", "expected"),
    [(Strategy.RECOMPUTE, False, True), (Strategy.RECOMPUTE, True, False), (Strategy.KEEP, False, False)],
)
def test_a_recompute_that_the_ranks_did_not_agree_to(strategy: Strategy, is_agreed: bool, expected: bool) -> None:
    plan = Plan({ep_block(experts(0)).name: strategy})
    loads = Loads(Expected(EVEN, frozenset({0})))
    assert needs_replan(loads, 0, routing(is_agreed=is_agreed), plan) is expected
    assert loads.agreed_layers == ({0} if is_agreed else set())


@pytest.mark.parametrize(
    ("num_planned", "expected", "growth"),
    [(None, False, 1.0), (100, False, 1.0), (80, True, 1.25), (0, True, math.inf)],
)
def test_all_experts_on_one_rank(num_planned: int | None, expected: bool, growth: float) -> None:
    loads, all_here = Loads(), Routing(num_pairs=100, count=lambda: None)
    loads.note(1, all_here)
    assert loads.needs_replan(experts(1), all_here, KEEP_ALL, num_planned) is expected
    assert not loads.by_layer and loads.expected == EXPECTED  # nothing is known of other ranks
    assert loads.growth == growth
    even = graph()
    assert loads.graph(even) == (even.with_loads({1: Load(1.25, 1.25)}) if num_planned == 80 else even)
    assert (loads.graph(even) == even) is (num_planned != 80)


# The graph


def graph() -> ActivationGraph:
    """Three layers: experts in the block that the ranks have to agree on."""
    segments = []
    for layer in range(3):
        blocks = [(ep_block(experts(layer)), -1), (experts(layer), 0)]
        blocks.append((Site(f"layers.{layer}.experts.up", "expert_up", layer), 1))
        operators = [Operator(site, parent, (), 0.01, 1024, 1024) for site, parent in blocks]
        values = [Value(owner, 4096, (2,), num_rows=16, is_routed=True) for owner in range(3)]
        segments.append(Segment(layer, tuple(operators), tuple(values)))
    return ActivationGraph(tuple(segments))


def recomputed_layers(known: ActivationGraph) -> list[int]:
    """Layers whose dispatch a plan may recompute."""
    return [segment.layer for segment in known.segments if segment.operators[0].site.is_recomputable]


def with_recomputes(known: ActivationGraph) -> ActivationGraph:
    """The same graph, if all ranks agreed in all layers."""
    segments = []
    for segment in known.segments:
        block, *others = segment.operators
        block = replace(block, site=replace(block.site, is_recomputable=True))
        segments.append(replace(segment, operators=(block, *others)))
    return replace(known, segments=tuple(segments))


def test_agreement_is_still_expected_of_later_layers_only() -> None:
    everywhere = Expected(EVEN, frozenset({0, 1, 2}))
    loads = noted(routing(is_agreed=True), routing(), expected=everywhere)
    assert recomputed_layers(loads.graph(graph(), up_to_layer=1)) == [0, 2]
    assert recomputed_layers(loads.graph(graph())) == [0]
    nowhere = noted(routing(is_agreed=True), routing())
    assert recomputed_layers(nowhere.graph(graph(), up_to_layer=1)) == [0]


def test_sizes_follow_what_has_come_and_then_what_is_expected() -> None:
    loads = noted(routing(1.5, 0.5), routing(0.25, 0.125), expected=Expected(Load(1.25, 0.75)))
    known = loads.graph(graph(), up_to_layer=1)
    scaled = graph().with_loads({0: Load(1.5, 0.5), 1: Load(0.25, 0.125), 2: Load(1.25, 0.75)})
    assert with_recomputes(known) == scaled
    assert [segment.values[0].num_bytes for segment in known.segments] == [2048, 512, 3072]  # rows
    assert [segment.values[2].num_bytes for segment in known.segments] == [6144, 1024, 5120]  # pairs
