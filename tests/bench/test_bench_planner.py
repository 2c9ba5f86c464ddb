"""The planner benchmark: its arithmetic on made-up comparisons, its problems, and what it says without scipy."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from flex_trainer.bench import planner
from flex_trainer.bench.exact import Optimum, solve
from flex_trainer.bench.planner import Comparison, meets, quality
from flex_trainer.bench.problems import deeper, problems, recorded
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.errors import UserError
from flex_trainer.planner.mitigation import MitigationPlanner
from flex_trainer.strategy import Strategy

TIMES = {"hit_ms": 0.1, "cold_ms": 15.0}


def comparison(chosen: float | None, bandwidth: float | None = 3.0, **optimum: Any) -> Comparison:
    seconds = {"optimal": chosen, "bandwidth": bandwidth, "largest_first": 4.0}
    if not optimum:
        return Comparison("any", seconds)
    defaults = {"seconds": 2.0, "bound_seconds": 2.0, "is_proven": True, "strategies": {}}
    return Comparison("any", seconds, Optimum(**{**defaults, **optimum}))


def test_ratios_are_taken_where_the_optimum_is_proven_and_not_tiny() -> None:
    found = quality(
        [
            comparison(2.0, is_proven=True),
            comparison(2.2, is_proven=True),
            comparison(3.0, is_proven=False, bound_seconds=1.0),
            comparison(1e-6, is_proven=True, seconds=1e-9),
            comparison(2.5),
        ]
    )
    assert found["num_problems"] == 5 and found["num_asked_for_optimum"] == 4
    assert found["num_proven_optimal"] == 3 and found["num_ratios"] == 2 and found["num_too_small_for_a_ratio"] == 1
    assert found["mean_vs_optimum"] == pytest.approx(1.05)
    assert found["worst_vs_optimum"] == pytest.approx(1.1)
    assert found["num_at_optimum"] == 1
    assert found["worst_vs_bound_where_unproven"] == pytest.approx(3.0)
    assert found["num_worse_than_algorithm_2"] == 0
    assert meets({**found, **TIMES}) == {"2": False, "3": True}


def test_worse_than_algorithm_2_and_missed_plans_are_counted() -> None:
    found = quality([comparison(3.1), comparison(None), comparison(None, None, is_proven=True)])
    assert found["num_worse_than_algorithm_2"] == 3
    assert found["num_missed"] == 1
    assert meets({**found, "mean_vs_optimum": 1.0, **TIMES})["2"] is False


def test_a_mean_within_the_bound_meets_it() -> None:
    found = quality([comparison(2.0, is_proven=True)])
    assert meets({**found, **TIMES}) == {"2": True, "3": True}
    assert meets({**found, "hit_ms": 0.3, "cold_ms": 15.0})["3"] is False


def test_recorded_problems_have_budgets_between_the_least_and_everything() -> None:
    graphs = recorded(("llama",), ((2, 64),))
    found = list(problems(graphs))
    assert len(found) == 5
    for problem in found:
        planned = MitigationPlanner(problem.graph, problem.allowed, problem.rates).plan(problem.available_bytes)
        assert planned.fits and planned.strategies
        assert planned.demand_peak_bytes > problem.available_bytes


def test_deeper_repeats_the_middle_layer() -> None:
    (graph,) = recorded(("llama",), ((2, 64),)).values()
    deep = deeper(graph, 10, 3)
    assert [segment.layer for segment in deep.segments] == [*range(10), -1]
    names = [operator.site.name for segment in deep.segments for operator in segment.operators]
    assert len(set(names)) == len(names)
    assert deep.segments[5].values[0].num_bytes == 3 * graph.segments[1].values[0].num_bytes


def test_quick_benchmark_has_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr(planner, "DEEP_LAYERS", 20)
    figures, bounds, met = planner.measure(is_quick=True)
    assert set(bounds) <= set(figures)
    assert set(met) == {"2", "3"}
    assert figures["num_worse_than_algorithm_2"] == 0
    assert figures["num_proven_optimal"] == 2


def test_without_scipy_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"needs scipy: pip install 'flex-trainer\[bench\]'"):
        solve(ActivationGraph((Segment(-1, (), ()),)), (Strategy.OFFLOAD,), Rates(), 1)
