"""Times predicted against times measured, and the plan against the alternatives: their arithmetic, and that it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flex_trainer.bench import times
from flex_trainer.bench.shapes import CHOICE_SHAPES, UNEQUAL_HEADS
from flex_trainer.bench.times import choice_ratio, time_error_percent, time_figures
from flex_trainer.bench.times_child import first_share_with_a_choice
from flex_trainer.testing.processes import SubprocessResult, run_in_subprocess


def turns(*measured: float, predicted: float = 100.0) -> list[list[tuple[float, float]]]:
    """Turns of three micro-batches, one of them disturbed."""
    return [[(predicted, one), (predicted, one), (predicted, 9 * one)] for one in measured]


def test_the_error_of_a_time_is_one_of_medians() -> None:
    assert time_error_percent(turns(80.0, 80.0, 80.0)) == pytest.approx(25.0)
    assert time_error_percent(turns(80.0, predicted=0.0)) is None


def test_ways_are_compared_within_turns() -> None:
    """In the second turn the machine was five times slower, for all; in the third, for the plan alone."""
    found = {
        "plan": turns(104.0, 520.0, 900.0, 104.0),
        "recompute": turns(100.0, 500.0, 100.0, 100.0),
        "offload": turns(208.0, 1040.0, 208.0, 208.0),
    }
    assert choice_ratio(found) == pytest.approx(1.04)
    assert choice_ratio({"plan": found["plan"]}) is None and choice_ratio({"keep": turns(1.0)}) is None


def test_figures_name_the_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: str, arguments: dict[str, Any], timeout_s: float) -> SubprocessResult:
        is_long = arguments["sequence_length"] == 2048
        plan = turns(100.0, 100.0, predicted=115.0 if is_long else 102.0)
        ways = {"plan": plan, "both": turns(90.0 if is_long else 101.0, 90.0 if is_long else 101.0)}
        return SubprocessResult([{"share": 0.6, "turns": ways, "refused": {"offload": "no"}}], 0, 0, "", "", "")

    monkeypatch.setattr(times, "run_in_subprocess", run)
    found = time_figures(False, Console(quiet=True))
    assert found["time_worst_case"] == "long at 60%, plan" and found["time_worst_error_percent"] == pytest.approx(15.0)
    assert found["choice_worst_case"] == "long at 60%" and found["choice_vs_best"] == pytest.approx(100 / 90)
    assert (found["num_choices"], found["num_times"], found["num_refused"]) == (8, 16, 8)


def test_the_shapes_are_those_that_plans_differ_on() -> None:
    assert len(CHOICE_SHAPES) == len({shape.name for shape in CHOICE_SHAPES}) == 8
    heads = UNEQUAL_HEADS.config
    assert heads["qk_nope_head_dim"] + heads["qk_rope_head_dim"] == 1.5 * heads["v_head_dim"]


@pytest.mark.sweep
def test_all_ways_take_turns_and_train_the_same() -> None:
    """On a model so small that the least limit may be refused to all."""
    config = {**UNEQUAL_HEADS.config, "num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16}
    arguments = {
        "architecture": "deepseek_v3",
        "config": config,
        "batch_size": 1,
        "sequence_length": 32,
        "shares": [0.01],
        "budget_seconds": 0.0,
        "num_micro_batches": 2,
        "most_turns": 2,
    }
    result = run_in_subprocess("flex_trainer.bench.times_child:compare", arguments, timeout_s=300.0)
    assert result.exit_code == 0, result.stderr
    ample, small = result.value
    assert ample["share"] == 1.0 and len(ample["turns"]["keep"]) == 2
    assert all(predicted > 0 and measured > 0 for turn in ample["turns"]["keep"] for predicted, measured in turn)
    assert set(small["turns"]) | set(small["refused"]) == {"plan", "recompute", "offload", "both"}


def test_where_a_limit_leaves_no_choice_a_higher_one_is_taken() -> None:
    tried: list[float] = []

    def ways_at(share: float) -> dict[str, Any]:
        tried.append(share)
        refused = {"plan": share < 0.7, "recompute": True, "offload": share < 0.75, "both": share < 0.8}
        return {name: SimpleNamespace(refusal="too low" if is_refused else "") for name, is_refused in refused.items()}

    assert first_share_with_a_choice(0.6, ways_at)[0] == 0.8
    assert tried == [0.6, 0.7, 0.8]
    assert first_share_with_a_choice(0.6, lambda _: ways_at(0.0))[0] == 0.9  # and no higher: those that ran are told
