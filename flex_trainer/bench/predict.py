"""`flex-trainer bench predict`: what the cost model says before a micro-batch runs, against what happens.

requirement 1   saved bytes: mean and worst error over families, shapes, dtypes and strategies, and for the routed
                part over rows from none to all of a group's; the process's peak: mean and worst error
times           time of a planned micro-batch, and the plan's time against that of other ways under its limit (times.py)
plan            time and memory of `flex-trainer plan` for the largest shipped recipes
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console

from flex_trainer.bench.plans import estimate_figures
from flex_trainer.bench.saved_bytes import (
    FAMILIES,
    ROUTED_FAMILIES,
    Comparison,
    compare_families,
    compare_routed,
)
from flex_trainer.bench.shapes import FEW_BIG_EXPERTS, LONG, REFERENCE, BenchShape, quick
from flex_trainer.bench.times import BOUNDS as TIME_BOUNDS
from flex_trainer.bench.times import time_figures
from flex_trainer.provision.device_books import MemoryLimitError
from flex_trainer.testing.processes import run_in_subprocess

BOUNDS = {
    "saved_mean_error_percent": 0.5,
    "saved_worst_error_percent": 2.0,
    "routed_mean_error_percent": 0.5,
    "routed_worst_error_percent": 2.0,
    "peak_mean_error_percent": 3.0,
    "peak_worst_error_percent": 8.0,
}
PLAN_BOUNDS = {"plan_wall_seconds": 30.0, "plan_peak_rss_gib": 3.0}
"""Of `flex-trainer plan` for the largest shipped recipes, start of the interpreter included."""
SHARES_LEFT = (None, 0.85, 0.75, 0.65, 0.55)
"""Limits that peaks are measured under: ample, and shares of what keeping everything takes above the start, down to the
first that is refused."""
NUM_STEPS = 4
_TIMEOUT_S = 1200.0


def measure(is_quick: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """Figures, bounds and met requirements."""
    console = Console(stderr=True)
    families, routed = (("deepseek_v3", "mixtral"), ("mixtral",)) if is_quick else (FAMILIES, ROUTED_FAMILIES)
    console.print(f"saved bytes of {len(families)} families", highlight=False)
    figures = _summary("saved", compare_families(families))
    console.print(f"routed part of {len(routed)} families", highlight=False)
    figures |= _summary("routed", compare_routed(routed))
    shapes = [quick(REFERENCE)]
    if not is_quick:
        shapes += [replace(quick(LONG), sequence_length=LONG.sequence_length // 2), quick(FEW_BIG_EXPERTS)]
    errors: dict[str, list[float]] = defaultdict(list)
    for shape in shapes:
        for key, found in _peaks(shape, SHARES_LEFT[:2] if is_quick else SHARES_LEFT, console).items():
            errors[key] += found
    figures |= {f"{key}_mean_error_percent": statistics.mean(found) for key, found in errors.items()}
    figures |= {f"{key}_worst_error_percent": max(found) for key, found in errors.items()}
    figures["num_peaks"] = len(errors["peak"])
    bounds, meets = dict(BOUNDS), {"1": all(figures[key] <= bound for key, bound in BOUNDS.items())}
    figures |= time_figures(is_quick, console)
    bounds |= TIME_BOUNDS
    meets["times"] = all(figures[key] <= bound for key, bound in TIME_BOUNDS.items())
    if not is_quick:
        console.print("plans of the largest recipes", highlight=False)
        plans = estimate_figures()
        figures |= {f"{name}/{key}": value for name, plan in plans.items() for key, value in plan.items()}
        figures["plan_wall_seconds"] = max(plan["wall_seconds"] for plan in plans.values())
        figures["plan_peak_rss_gib"] = max(plan["peak_rss_bytes"] for plan in plans.values()) / 2**30
        bounds |= PLAN_BOUNDS
        meets["plan"] = all(figures[key] <= bound for key, bound in PLAN_BOUNDS.items())
    return figures, bounds, meets


def _summary(name: str, comparisons: Iterable[Comparison]) -> dict[str, Any]:
    done = list(comparisons)
    worst = max(done, key=lambda comparison: comparison.error_percent)
    by_choice: dict[str, list[float]] = defaultdict(list)
    for comparison in done:
        by_choice[comparison.choice].append(comparison.error_percent)
    return {
        f"{name}_mean_error_percent": statistics.mean(comparison.error_percent for comparison in done),
        f"{name}_worst_error_percent": worst.error_percent,
        f"{name}_worst_case": f"{worst.case}, {worst.choice}",
        f"num_{name}": len(done),
        f"num_{name}_exact": sum(comparison.error_percent == 0 for comparison in done),
        **{f"{name}_{choice}_mean_error_percent": statistics.mean(errors) for choice, errors in by_choice.items()},
    }


def _peaks(shape: BenchShape, shares: Iterable[float | None], console: Console) -> dict[str, list[float]]:
    """Errors of the predicted peak in percent: of the process, of the process in each run's first micro-batch (before
    anything was learnt), and of what comes on top of the start."""
    errors: dict[str, list[float]] = defaultdict(list)
    limit_bytes = None
    lowest_bytes = highest_bytes = 0
    for share in shares:
        if share is not None:
            limit_bytes = int(lowest_bytes + share * (highest_bytes - lowest_bytes))
        console.print(f"{shape.name}: peaks, {'ample' if share is None else f'{share:.0%} left'}", highlight=False)
        arguments = {
            "architecture": shape.architecture,
            "config": shape.config,
            "batch_size": shape.batch_size,
            "lengths": [shape.sequence_length] * NUM_STEPS,
            "side": "flex",
            "limit_bytes": limit_bytes,
        }
        result = run_in_subprocess("flex_trainer.bench.child:train", arguments, timeout_s=_TIMEOUT_S)
        if result.error.startswith(MemoryLimitError.__name__):
            console.print("refused: below the minimum-memory plan", highlight=False)
            break
        if result.exit_code != 0:
            reason = result.error or f"exit code {result.exit_code}"
            raise RuntimeError(f"{shape.name} under {limit_bytes} bytes ended with {reason}: {result.stderr[-2000:]}")
        records = result.value["records"]
        if share is None:
            lowest_bytes = max(record["baseline_bytes"] for record in records)
            highest_bytes = max(record["peak_bytes"] for record in records)
        for number, record in enumerate(record for record in records if not record["is_profile"]):
            error = 100 * abs(record["predicted_peak_bytes"] - record["peak_bytes"]) / record["peak_bytes"]
            above_bytes = record["peak_bytes"] - record["baseline_bytes"]
            predicted_bytes = record["predicted_peak_bytes"] - record["baseline_bytes"]
            errors["peak"].append(error)
            errors["peak_above_start"].append(100 * abs(predicted_bytes - above_bytes) / above_bytes)
            if number == 0:
                errors["first_peak"].append(error)
    return errors
