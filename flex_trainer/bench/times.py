"""Part of `flex-trainer bench predict`: times predicted against times measured, and whether the plan is the right one.

How noise is kept out: all ways of one limit run in one process in turns, a different one first each time, and the first
two turns are left out; a time is the median over all micro-batches of a way; two ways are compared by the median over
turns of the ratio within a turn, so that a slow minute of the machine counts for both. After four turns a limit ends
with `SECONDS_PER_LIMIT`: with the start of a process and two limits, a shape takes two minutes or so on two idle cores,
and all of them 16.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from flex_trainer.bench.shapes import CHOICE_SHAPES, BenchShape
from flex_trainer.bench.times_child import ALTERNATIVES, PLAN
from flex_trainer.testing.processes import run_in_subprocess

BOUNDS = {"time_mean_error_percent": 8.0, "time_worst_error_percent": 20.0, "choice_vs_best": 1.05}
SHARES = (0.8, 0.6)
SECONDS_PER_LIMIT = 50.0
_NUM_MICRO_BATCHES = 3
_MOST_TURNS = 9
_TIMEOUT_S = 1200.0

Turns = Sequence[Sequence[Sequence[float]]]
"""Of one way: turns of micro-batches of (predicted, measured) milliseconds."""


def time_figures(is_quick: bool, console: Console) -> dict[str, Any]:
    """Errors of predicted times and ratios of the plan's time to the best alternative's, over shapes and limits.

    Raises:
        RuntimeError: a run failed, or trained something else.
    """
    shapes = CHOICE_SHAPES[:1] if is_quick else CHOICE_SHAPES
    errors: dict[str, float] = {}
    ratios: dict[str, float] = {}
    refused: list[str] = []
    for shape in shapes:
        console.print(f"{shape.name}: times, and what else could have been chosen", highlight=False)
        for case in _cases(shape, is_quick):
            name = f"{shape.name} at {case['share']:.0%}"
            refused += [f"{name}: {way}" for way in case["refused"]]
            for way, turns in case["turns"].items():
                error = time_error_percent(turns)
                if error is not None:
                    errors[f"{name}, {way}"] = error
            ratio = choice_ratio(case["turns"])
            if ratio is not None:
                ratios[name] = ratio
                console.print(f"{name}: plan / best alternative {ratio:.3f}", highlight=False)
    if not ratios:
        raise RuntimeError(f"no limit left a choice: {', '.join(refused)}")
    worst = max(errors, key=errors.__getitem__)
    return {
        "time_mean_error_percent": statistics.mean(errors.values()),
        "time_worst_error_percent": errors[worst],
        "time_worst_case": worst,
        "num_times": len(errors),
        "choice_vs_best": max(ratios.values()),
        "choice_worst_case": max(ratios, key=ratios.__getitem__),
        "num_choices": len(ratios),
        "num_refused": len(refused),
        "times": {"error_percent": errors, "choice_vs_best": ratios, "refused": refused},
    }


def _cases(shape: BenchShape, is_quick: bool) -> list[dict[str, Any]]:
    arguments = {
        "architecture": shape.architecture,
        "config": shape.config,
        "batch_size": shape.batch_size,
        "sequence_length": shape.sequence_length,
        "shares": SHARES[1:] if is_quick else SHARES,
        "budget_seconds": 0.0 if is_quick else SECONDS_PER_LIMIT,
        "num_micro_batches": 1 if is_quick else _NUM_MICRO_BATCHES,
        "most_turns": _MOST_TURNS,
    }
    result = run_in_subprocess("flex_trainer.bench.times_child:compare", arguments, timeout_s=_TIMEOUT_S)
    if result.exit_code != 0:
        reason = result.error or f"exit code {result.exit_code}"
        raise RuntimeError(f"{shape.name} ended with {reason}: {result.stderr[-2000:]}")
    return result.value


def time_error_percent(turns: Turns) -> float | None:
    """Error of the median predicted time against the median measured one; None where nothing was predicted."""
    pairs = [pair for turn in turns for pair in turn if pair[0] > 0]
    if not pairs:
        return None
    predicted, measured = (statistics.median(times) for times in zip(*pairs, strict=True))
    return 100 * abs(predicted - measured) / measured


def choice_ratio(turns: Mapping[str, Turns]) -> float | None:
    """Time of the plan over that of the best alternative under the same limit; None where there is none."""
    plan = turns.get(PLAN, ())
    ratios = [
        statistics.median(_turn_ms(ours) / _turn_ms(theirs) for ours, theirs in zip(plan, turns[name], strict=False))
        for name in ALTERNATIVES
        if plan and turns.get(name)
    ]
    return max(ratios, default=None)


def _turn_ms(turn: Iterable[Sequence[float]]) -> float:
    return statistics.median(measured for _, measured in turn)
