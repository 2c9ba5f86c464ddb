"""Plans picked from known choices: they fit, cost nearly what Algorithm 2 takes, and no uniform plan is faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.cost.compiled import forget_structures
from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.cost.roofline import Rates, Roofline
from flex_trainer.planner.mitigation import MitigationPlanner
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Site, Strategy
from tests.planner.graphs import graphs
from tests.tiers import examples

RECOMPUTE, OFFLOAD, QUANTIZE = Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE
SETS = ((RECOMPUTE, OFFLOAD), (RECOMPUTE,), (OFFLOAD,), (RECOMPUTE, OFFLOAD, QUANTIZE))
SLACK_SECONDS = 1e-12


def uniform_ways(graph: ActivationGraph, allowed: tuple[Strategy, ...], rates: Rates, room: int) -> list[Plan]:
    """One strategy in every k-th layer, outside of the layers too or not, and Algorithm 2 with one strategy alone."""
    planner = MitigationPlanner(graph, allowed, rates)
    ways = [MitigationPlanner(graph, (one,), rates, method="bandwidth").plan(room) for one in allowed]
    for strategy in allowed:
        for every in (1, 2, 3, 4):
            for with_outside in (False, True):
                names = {
                    operator.site.name: strategy
                    for number, segment in enumerate(graph.segments)
                    for operator in segment.operators
                    if operator.site.allows(strategy)
                    and (with_outside if segment.layer < 0 else number % every == every - 1)
                }
                ways.append(planner.evaluated(names))
    return [way for way in ways if way.peak_bytes <= room]


@pytest.mark.parametrize("method", ["optimal", "bandwidth", "largest_first"])
@examples(25)
@given(graphs(), st.sampled_from(SETS), st.floats(0.0, 1.0), st.sampled_from((0, 4096)))
def test_no_uniform_way_that_fits_is_faster(
    method: str, graph: ActivationGraph, allowed: tuple[Strategy, ...], share: float, in_flight_bytes: int
) -> None:
    rates = Rates(in_flight_bytes=in_flight_bytes, smallest_moved_bytes=0)
    demand_bytes = MitigationPlanner(graph, (), rates).plan(2**60).demand_peak_bytes
    room = int(share * demand_bytes)
    plan = MitigationPlanner(graph, allowed, rates, method=method).plan(room)
    ways = uniform_ways(graph, allowed, rates, room)
    assert plan.fits or not ways
    if ways and method != "largest_first":  # its own order alone may be worse than the order by bandwidth
        assert plan.added_seconds <= min(way.added_seconds for way in ways) + SLACK_SECONDS


@examples(40)
@given(graphs(), st.sampled_from(SETS), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_known_choices_make_plans_that_fit(
    graph: ActivationGraph, allowed: tuple[Strategy, ...], first: float, second: float
) -> None:
    forget_structures()
    rates = Rates(smallest_moved_bytes=0)
    demand_bytes = MitigationPlanner(graph, (), rates).plan(2**60).demand_peak_bytes
    for share in (first, second):
        room = int(share * demand_bytes)
        plan = MitigationPlanner(graph, allowed, rates, method="bandwidth", reuses=True).plan(room)
        again = MitigationPlanner(graph, allowed, rates).evaluated(plan.strategies)
        assert (plan.peak_bytes, plan.predicted_bytes, plan.transient_bytes) == (
            again.peak_bytes,
            again.predicted_bytes,
            again.transient_bytes,
        )
        assert plan.fits == (plan.peak_bytes <= room)
        if MitigationPlanner(graph, allowed, rates, method="bandwidth").plan(room).fits:
            assert plan.fits


def chain(layer: int, num: int = 4) -> Segment:
    """Operators that each save what they take."""
    kinds = ("norm", "linear", "attention_core", "linear")
    operators = tuple(
        Operator(Site(f"l{layer}.o{index}", kinds[index], layer), -1, (index,), 1e-4, 2**20, 2**20)
        for index in range(num)
    )
    values = tuple(Value(index - 1, 2**20, (index,)) for index in range(num))
    return Segment(layer, operators, (*values, Value(num - 1, 2**20, (-1,))))


def test_choices_that_other_rates_made_worth_having_are_not_all_there_is() -> None:
    """A plan made while copies were slow recomputes; once they are fast, the next one offloads."""
    forget_structures()
    graph = ActivationGraph((*map(chain, range(6)), Segment(-1, (), ())))
    slow, fast = (Rates(offload=Roofline(1e-6, speed), smallest_moved_bytes=0) for speed in (1e6, 1e12))
    room = MitigationPlanner(graph, (), slow).plan(2**60).demand_peak_bytes * 2 // 3
    plans = [
        MitigationPlanner(graph, (RECOMPUTE, OFFLOAD), rates, method="bandwidth", reuses=True).plan(room)
        for rates in (slow, slow, fast, fast)
    ]
    offloads = [OFFLOAD in plan.strategies.values() for plan in plans]
    assert offloads == [False, False, True, True]
    assert [plan.fits for plan in plans] == [True] * 4
