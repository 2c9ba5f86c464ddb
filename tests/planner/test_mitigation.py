"""Algorithm 2 on random graphs: it fits or is the minimum-memory, costs nothing when not needed, and obeys."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.planner.mitigation import METHODS, MitigationPlanner
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.cost_rules import evaluate
from tests.planner.graphs import graphs
from tests.tiers import examples

RECOMPUTE, OFFLOAD, QUANTIZE = Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE
ALL = (RECOMPUTE, OFFLOAD, QUANTIZE)
allowed_sets = st.sampled_from(((RECOMPUTE,), (OFFLOAD,), (QUANTIZE,), (RECOMPUTE, OFFLOAD), ALL))


def planner(graph: ActivationGraph, allowed: tuple[Strategy, ...] = ALL, method: str = "optimal") -> MitigationPlanner:
    return MitigationPlanner(graph, allowed, Rates(), method=method)


def share_of_demand(graph: ActivationGraph, share: float) -> int:
    return int(share * planner(graph).plan(2**60).demand_peak_bytes)


@examples(40)
@given(graph=graphs(), allowed=allowed_sets)
def test_enough_memory_means_no_mitigation_and_no_time(graph: ActivationGraph, allowed: tuple[Strategy, ...]) -> None:
    demand_bytes = planner(graph, allowed).plan(2**60).demand_peak_bytes
    plan = planner(graph, allowed).plan(demand_bytes)
    assert plan.fits and not plan.strategies and plan.added_seconds == 0
    assert plan.peak_bytes == plan.demand_peak_bytes == demand_bytes
    assert plan.predicted_bytes == plan.demand_bytes


@examples(40)
@given(graph=graphs(), allowed=allowed_sets, share=st.floats(0, 1))
def test_plan_obeys_its_limits(graph: ActivationGraph, allowed: tuple[Strategy, ...], share: float) -> None:
    available_bytes = share_of_demand(graph, share)
    plan = planner(graph, allowed).plan(available_bytes)
    sites = {op.site.name: op.site for segment in graph.segments for op in segment.operators}
    assert plan.fits == (plan.peak_bytes <= available_bytes)
    assert set(plan.strategies.values()) <= set(allowed)
    assert all(sites[name].is_recomputable for name, s in plan.strategies.items() if s is RECOMPUTE)
    assert all(sites[name].kind != "router" for name, s in plan.strategies.items() if s is QUANTIZE)
    assert 0 <= plan.predicted_bytes <= plan.peak_bytes
    again = planner(graph, allowed).evaluated(plan.strategies)
    assert (again.strategies, again.peak_bytes) == (plan.strategies, plan.peak_bytes)
    assert (again.predicted_bytes, again.added_seconds) == (plan.predicted_bytes, pytest.approx(plan.added_seconds))
    # What the plan says of itself is what its strategies cost, evaluated from nothing.
    costs = [
        evaluate(
            segment,
            {
                i: plan.strategies[op.site.name]
                for i, op in enumerate(segment.operators)
                if op.site.name in plan.strategies
            },
            Rates(),
        )
        for segment in graph.segments
    ]
    assert plan.predicted_bytes == sum(cost.held_bytes for cost in costs)
    assert plan.added_seconds == pytest.approx(sum(cost.added_seconds for cost in costs))


@examples(40)
@given(graph=graphs(), allowed=allowed_sets, share=st.floats(0, 1))
def test_never_called_too_large_when_mitigating_everything_fits(
    graph: ActivationGraph, allowed: tuple[Strategy, ...], share: float
) -> None:
    available_bytes = share_of_demand(graph, share)
    plan = planner(graph, allowed).plan(available_bytes)
    for strategy in allowed:
        everywhere = uniform(graph, allowed, strategy)
        assert plan.fits or plan.peak_bytes <= everywhere.peak_bytes
    if RECOMPUTE in allowed:
        for other in allowed:
            within = recomputed_within_layers(graph, allowed, other)
            assert plan.fits or plan.peak_bytes <= within.peak_bytes


def recomputed_within_layers(graph: ActivationGraph, allowed: tuple[Strategy, ...], other: Strategy) -> Plan:
    """The plan when all but whole layers is recomputed, and what layers make between their operators is moved."""
    fixed = {}
    for segment in graph.segments:
        for op in segment.operators:
            ways = [one for one in (RECOMPUTE, other) if one is not RECOMPUTE or op.site.kind != "layer"]
            fixed[op.site.name] = next((one for one in ways if op.site.allows(one)), Strategy.KEEP)
    return planner(graph, allowed).plan(2**60, fixed=fixed)


def uniform(graph: ActivationGraph, allowed: tuple[Strategy, ...], strategy: Strategy) -> Plan:
    """The plan when all sites that may are fixed to one strategy, and the others are kept."""
    fixed = {}
    for segment in graph.segments:
        for op in segment.operators:
            may = op.site.is_recomputable if strategy is RECOMPUTE else strategy is OFFLOAD or op.site.kind != "router"
            fixed[op.site.name] = strategy if may else Strategy.KEEP
    return planner(graph, allowed).plan(2**60, fixed=fixed)


@examples(40)
@given(graph=graphs(), shares=st.lists(st.floats(0.1, 1), min_size=2, max_size=5))
def test_more_memory_costs_no_more_time_up_to_the_slack_of_greed(graph: ActivationGraph, shares: list[float]) -> None:
    # Greedy choices are not monotone: a tighter limit may stop after one cheap mitigation that is large, where a looser
    # one stopped after several small ones. Exact: no plan costs more than all single mitigations of that graph
    # together.
    plans = [planner(graph).plan(share_of_demand(graph, share)) for share in sorted(shares)]
    bound = everything_costs(graph)
    for tight, loose in zip(plans, plans[1:], strict=False):
        assert tight.added_seconds <= bound and loose.added_seconds <= bound
        if tight.fits:
            assert loose.fits
            assert loose.added_seconds <= tight.added_seconds + largest_step(graph)


def largest_step(graph: ActivationGraph) -> float:
    """Most time that mitigating one segment can cost: what greed may be off by."""
    return max(
        max(evaluate(s, dict.fromkeys(range(len(s.operators)), kind), Rates()).added_seconds for kind in ALL)
        for s in graph.segments
    )


def everything_costs(graph: ActivationGraph) -> float:
    rates = Rates()
    total = 0.0
    for segment in graph.segments:
        total += sum(op.seconds + rates.recompute_overhead_seconds for op in segment.operators)
        total += sum(max(rates.moved(s, v.num_bytes) for s in (OFFLOAD, QUANTIZE)) for v in segment.values)
    return total


@examples(40)
@given(graph=graphs(), share=st.floats(0, 1), data=st.data())
def test_what_has_run_stays_as_it_ran(graph: ActivationGraph, share: float, data: st.DataObject) -> None:
    names = [op.site.name for segment in graph.segments for op in segment.operators if op.site.is_recomputable]
    ran = names[: data.draw(st.integers(0, len(names)))]
    fixed = {name: data.draw(st.sampled_from((Strategy.KEEP, *ALL))) for name in ran}
    plan = planner(graph).plan(share_of_demand(graph, share), fixed=fixed)
    for name, strategy in fixed.items():
        assert plan.strategies.get(name, Strategy.KEEP) is strategy


@examples(40)
@given(graph=graphs(), share=st.floats(0, 1), method=st.sampled_from(METHODS))
def test_same_question_same_answer(graph: ActivationGraph, share: float, method: str) -> None:
    available_bytes = share_of_demand(graph, share)
    one = planner(graph, method=method)
    first, again = one.plan(available_bytes), one.plan(available_bytes)
    assert first == again == planner(graph, method=method).plan(available_bytes)


def layer_of_two(small_seconds: float = 1e-4, large_seconds: float = 1e-2) -> ActivationGraph:
    """Two operators in each of two layers: a small value that is cheap to recompute, a large one that is dear."""

    def layer(number: int) -> Segment:
        small, large = (Site(f"{number}.{name}", "norm", number) for name in ("small", "large"))
        return Segment(
            number,
            (Operator(small, -1, (0,), small_seconds, 0, 0), Operator(large, -1, (0,), large_seconds, 0, 0)),
            (Value(-1, 1000, (-1,)), Value(0, 400_000, (0,)), Value(1, 600_000, (1,))),
        )

    return ActivationGraph((layer(0), layer(1), Segment(-1, (), ())))


def test_bandwidth_takes_the_cheap_one_and_largest_first_the_large_one() -> None:
    graph = layer_of_two()
    demand_bytes = planner(graph).plan(2**60).demand_peak_bytes
    by_bandwidth = planner(graph, (RECOMPUTE,)).plan(demand_bytes - 100_000)
    by_size = planner(graph, (RECOMPUTE,), method="largest_first").plan(demand_bytes - 100_000)
    assert {name.split(".")[1] for name in by_bandwidth.strategies} == {"small"}
    assert {name.split(".")[1] for name in by_size.strategies} == {"large"}
    assert by_bandwidth.added_seconds < by_size.added_seconds


def test_what_became_unnecessary_is_taken_back() -> None:
    # The cheap one goes first and does not suffice; the large one alone does.
    graph = layer_of_two()
    demand = planner(graph, (RECOMPUTE,)).plan(2**60)
    plan = planner(graph, (RECOMPUTE,)).plan(demand.demand_peak_bytes - 599_000)
    assert plan.fits
    for name in plan.strategies:
        rest = {n: s for n, s in plan.strategies.items() if n != name}
        fixed = {op.site.name: rest.get(op.site.name, Strategy.KEEP) for s in graph.segments for op in s.operators}
        without = planner(graph, (RECOMPUTE,)).plan(2**60, fixed=fixed)
        assert without.peak_bytes > demand.demand_peak_bytes - 599_000


def test_two_steps_that_free_nothing_alone() -> None:
    # A saves what B made and B's input is only held when B is recomputed: alone, B trades one value for an equal one.
    # Only together with the operator that made that input is anything freed.
    sites = [Site(name, "norm", 0) for name in ("a", "b")]
    graph = ActivationGraph(
        (
            Segment(
                0,
                (Operator(sites[0], -1, (0,), 1e-3, 0, 0), Operator(sites[1], -1, (1,), 1e-3, 0, 0)),
                (Value(-1, 10, (-1,)), Value(0, 500_000, ()), Value(1, 500_000, (-1,))),
            ),
            Segment(1, (), (Value(-1, 1_000_000, (-1,)),)),
            Segment(-1, (), ()),
        )
    )
    plan = planner(graph, (RECOMPUTE,)).plan(1_400_000)
    assert plan.fits
    assert plan.strategies == {"a": RECOMPUTE, "b": RECOMPUTE}


def test_gradients_that_backward_allocates_leave_less_room() -> None:
    graph = layer_of_two()
    demand_bytes = planner(graph).plan(2**60).demand_peak_bytes
    gradients = GradientBytes(pending={0: 300_000, 1: 300_000})
    assert planner(graph).plan(demand_bytes).strategies == {}
    plan = planner(graph).plan(demand_bytes, gradients)
    assert plan.fits and plan.strategies
    assert plan.demand_peak_bytes > demand_bytes


def test_a_value_that_recomputes_share_is_counted_once() -> None:
    def layer(number: int) -> Segment:
        site = Site(f"{number}.core", "attention_core", number)
        return Segment(number, (Operator(site, -1, (), 1e-4, 0, 0, shared_inputs=(0,)),), (Value(0, 900_000, (0,)),))

    graph = ActivationGraph((layer(0), layer(1), Segment(-1, (), ())), shared_bytes=(100_000,))
    for chosen, held in (((), 1_800_000), (("0.core",), 1_000_000), (("0.core", "1.core"), 100_000)):
        fixed = {f"{n}.core": RECOMPUTE if f"{n}.core" in chosen else Strategy.KEEP for n in (0, 1)}
        assert planner(graph, (RECOMPUTE,)).plan(2**60, fixed=fixed).predicted_bytes == held


def test_greed_is_close_to_the_best_of_all_plans_on_a_layer() -> None:
    # Small enough to try every plan: 3 choices for each of 4 operators.
    graph = layer_of_two(small_seconds=3e-4, large_seconds=9e-4)
    sites = [op.site.name for segment in graph.segments for op in segment.operators]
    demand_bytes = planner(graph).plan(2**60).demand_peak_bytes
    for share in (0.6, 0.75, 0.9, 0.97):
        available_bytes = int(share * demand_bytes)
        greedy = planner(graph, (RECOMPUTE, OFFLOAD)).plan(available_bytes)
        best = min(
            plan.added_seconds
            for choice in product((Strategy.KEEP, RECOMPUTE, OFFLOAD), repeat=len(sites))
            if (plan := planner(graph).plan(2**60, fixed=dict(zip(sites, choice, strict=True)))).peak_bytes
            <= available_bytes
        )
        assert greedy.fits and best <= greedy.added_seconds <= 1.5 * best
