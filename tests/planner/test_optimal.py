"""The time-optimal planner and the exact programme, both against every plan there is, on graphs small enough to try."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from flex_trainer.bench.exact import solve
from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.cost.roofline import Rates, Roofline
from flex_trainer.cost.segment_cost import SegmentCost
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.mitigation import METHODS, MitigationPlanner
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.cost_rules import evaluate
from tests.tiers import first_quick

RECOMPUTE, OFFLOAD, QUANTIZE = Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE
UNIT_BYTES = 32 * 1024
GRADIENTS = GradientBytes(pending={0: 3 * UNIT_BYTES, 1: UNIT_BYTES}, temporary={-1: UNIT_BYTES})
FACTOR = 1.25


def layer(number: int, draw: random.Random) -> Segment:
    """A block with two operators, and one beside it: each takes the value before, and saves what it takes or makes."""
    names = (("block", "mlp"), ("block.up", "linear"), ("block.act", "activation"), ("norm", "norm"))
    sites = [Site(f"{number}.{name}", kind, number, is_block=kind == "mlp") for name, kind in names]
    parents = (-1, 0, 0, -1)
    values = [Value(-1, draw.randrange(1, 5) * UNIT_BYTES, (-1,) if draw.random() < 0.5 else ())]
    operators = []
    for index, site in enumerate(sites):
        taken = len(values) - 1 if index else 0
        saved = draw.random() < 0.6
        if saved and not site.is_block:
            values[taken] = replace(values[taken], savers=(*values[taken].savers, index))
        for _ in range(draw.randrange(1, 3)):
            savers = tuple(saver for saver in (index, -1) if draw.random() < 0.4)
            values.append(Value(index, draw.randrange(1, 9) * UNIT_BYTES, savers))
        shared = (0,) if number >= 0 and draw.random() < 0.2 else ()
        seconds = draw.randrange(1, 30) * 1e-4 + (
            60e-4 if site.is_block else 0.0
        )  # a block's time includes those inside
        operators.append(Operator(site, parents[index], (taken,), seconds, UNIT_BYTES, UNIT_BYTES, shared))
    return Segment(number, tuple(operators), tuple(values))


def problem(seed: int) -> tuple[ActivationGraph, tuple[Strategy, ...], Rates]:
    draw = random.Random(seed)
    graph = ActivationGraph((layer(0, draw), layer(1, draw), layer(-1, draw)), (2 * UNIT_BYTES,))
    allowed = ((RECOMPUTE,), (OFFLOAD,), (RECOMPUTE, OFFLOAD), (RECOMPUTE, OFFLOAD, QUANTIZE))[seed % 4]
    rates = Rates(Roofline(1e-4, 1e9), Roofline(5e-5, 2e9), in_flight_bytes=draw.choice((0, 2, 10)) * UNIT_BYTES)
    return graph, allowed, rates


def distinct_costs(segment: Segment, allowed: tuple[Strategy, ...], rates: Rates) -> list[SegmentCost]:
    """The cheapest choice of each kind that differs in what the timeline sees."""
    cheapest: dict[object, SegmentCost] = {}
    for choice in product((Strategy.KEEP, *allowed), repeat=len(segment.operators)):
        if all(op.site.allows(strategy) for op, strategy in zip(segment.operators, choice, strict=True)):
            cost = evaluate(segment, dict(enumerate(choice)), rates)
            key = replace(cost, added_seconds=0.0)
            if key not in cheapest or cost.added_seconds < cheapest[key].added_seconds:
                cheapest[key] = cost
    costs = sorted(cheapest.values(), key=lambda cost: cost.added_seconds)
    kept: list[SegmentCost] = []
    for cost in costs:
        if not any(
            other.held_bytes <= cost.held_bytes
            and other.on_top_bytes <= cost.on_top_bytes
            and other.offloaded_bytes <= cost.offloaded_bytes
            and other.shared <= cost.shared
            for other in kept
        ):
            kept.append(cost)
    return kept


def best_of_all(graph: ActivationGraph, allowed: tuple[Strategy, ...], rates: Rates, available: int) -> float | None:
    rates = replace(rates, transient_factor=FACTOR)
    every = [distinct_costs(segment, allowed, rates) for segment in graph.segments]
    best: float | None = None
    for costs in product(*every):
        seconds = sum(cost.added_seconds for cost in costs)
        if best is not None and seconds >= best:
            continue
        timeline = Timeline(costs, graph.segments, GRADIENTS, graph.shared_bytes, rates.in_flight_bytes)
        if timeline.peak().num_bytes <= available:
            best = seconds
    return best


def chosen(seed: int, share: float, method: str = "optimal") -> tuple[Plan, int]:
    graph, allowed, rates = problem(seed)
    planner = MitigationPlanner(graph, allowed, rates, method=method, transient_factor=FACTOR)
    available_bytes = int(share * planner.plan(2**60, GRADIENTS).demand_peak_bytes)
    return planner.plan(available_bytes, GRADIENTS), available_bytes


@pytest.mark.parametrize("seed", first_quick(range(8), 4))  # one of each set of strategies
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_exact_programme_and_planner_against_all_plans(seed: int, share: float) -> None:
    pytest.importorskip("scipy")
    graph, allowed, rates = problem(seed)
    plan, available_bytes = chosen(seed, share)
    best = best_of_all(graph, allowed, rates, available_bytes)
    optimum = solve(graph, allowed, rates, available_bytes, gradients=GRADIENTS, transient_factor=FACTOR)
    assert optimum.is_proven
    assert plan.fits == (best is not None)
    if best is None:
        assert optimum.seconds is None
    else:
        assert optimum.seconds == pytest.approx(best, rel=1e-4, abs=1e-9)
        assert best * (1 - 1e-9) - 1e-12 <= plan.added_seconds <= best * 1.001 + 1e-9


@pytest.mark.parametrize("seed", first_quick(range(30), 8))
@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
def test_never_worse_than_algorithm_2(seed: int, share: float) -> None:
    plan, available_bytes = chosen(seed, share)
    assert plan.fits == (plan.peak_bytes <= available_bytes)
    for method in METHODS:
        other, _ = chosen(seed, share, method)
        assert plan.fits or not other.fits
        if other.fits:
            assert plan.added_seconds <= other.added_seconds + 1e-9
        elif not plan.fits:
            assert plan.peak_bytes <= other.peak_bytes


def deep(num_layers: int) -> ActivationGraph:
    draw = random.Random(4)
    first, outside = layer(0, draw), layer(-1, draw)
    layers = [
        replace(
            first,
            layer=number,
            operators=tuple(
                replace(op, site=replace(op.site, name=f"{number}.{op.site.kind}", layer=number))
                for op in first.operators
            ),
        )
        for number in range(num_layers)
    ]
    return ActivationGraph((*layers, outside), (2 * UNIT_BYTES,))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_deep_models_fit_and_are_no_worse_than_algorithm_2(share: float) -> None:
    graph = deep(40)
    plans = {}
    for method in METHODS:
        planner = MitigationPlanner(graph, (RECOMPUTE, OFFLOAD), Rates(in_flight_bytes=UNIT_BYTES), method=method)
        least_bytes = planner.plan(0).peak_bytes
        demand_bytes = planner.plan(2**60).demand_peak_bytes
        plans[method] = planner.plan(int(least_bytes + share * (demand_bytes - least_bytes)))
    assert all(plan.fits for plan in plans.values())
    assert plans["optimal"].added_seconds <= min(plan.added_seconds for plan in plans.values()) + 1e-9


def test_layers_that_ran_keep_what_they_did_and_the_rest_makes_up_for_it() -> None:
    graph = deep(6)
    planner = MitigationPlanner(graph, (RECOMPUTE, OFFLOAD), Rates())
    demand_bytes = planner.plan(2**60).demand_peak_bytes
    free = planner.plan(int(0.7 * demand_bytes))
    ran = {op.site.name: Strategy.KEEP for segment in graph.segments[:3] for op in segment.operators}
    plan = planner.plan(int(0.7 * demand_bytes), fixed=ran)
    assert not set(plan.strategies) & set(ran)
    assert free.fits and plan.fits
    assert plan.added_seconds >= free.added_seconds


def test_noise_in_measured_times_does_not_pick_layers() -> None:
    graph = deep(2)
    noisy = replace(
        graph.segments[1],
        operators=tuple(replace(op, seconds=op.seconds * 0.5) for op in graph.segments[1].operators),
    )
    uneven = replace(graph, segments=(graph.segments[0], noisy, graph.segments[2]))
    every = MitigationPlanner(uneven, (RECOMPUTE,), Rates(recompute_overhead_seconds=0.0)).uniform(RECOMPUTE)
    equal = MitigationPlanner(graph, (RECOMPUTE,), Rates(recompute_overhead_seconds=0.0)).uniform(RECOMPUTE)
    outside = evaluate(
        graph.segments[2], dict.fromkeys(range(4), RECOMPUTE), Rates(recompute_overhead_seconds=0.0)
    ).added_seconds
    assert every.added_seconds - outside == pytest.approx(0.75 * (equal.added_seconds - outside))
