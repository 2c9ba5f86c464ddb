"""`flex-trainer bench step`: FlexTrainer against the plain Trainer and against gradient checkpointing.

    requirement 1   under a real cap between both, plain dies, FlexTrainer finishes with bit-equal losses
    requirement 2   step time there: against checkpointing, and against plain without a cap
    requirement 3   step time with ample memory: against plain
    requirement 4   300 micro-batches of 1x to 8x the shortest length: peak against limit
    requirement 5   planning time against step time
    peers           what a user would pick instead (bench/peers.py), in the same turns: peak and time of each in one
                    table, losses equal to the plain run's

All sides run in turns, each in a fresh process (its own peak, its own cap); times are medians over all rounds, without
the first steps of each process. Deterministic algorithms are on for all sides, so that losses compare bit by bit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from flex_trainer.bench.child import varied_lengths
from flex_trainer.bench.peers import PEERS
from flex_trainer.bench.shapes import FEW_BIG_EXPERTS, LONG, REFERENCE, UNEQUAL_HEADS, BenchShape, quick
from flex_trainer.testing.processes import SubprocessResult, run_in_subprocess

BOUNDS = {
    "cap_vs_checkpoint_step_ratio": 0.80,
    "cap_vs_plain_step_ratio": 1.20,
    "ample_vs_plain_step_ratio": 1.03,
    "peak_vs_limit": 1.0,
    "use_of_limit_under_demand": 0.85,
    "plan_share": 0.005,
}
CAP_SHARE = 0.6
"""Where the cap lies between checkpointing's peak (0) and plain's (1)."""
WARM_UP_STEPS = 2
"""Steps left out of the times: first touches, the profile and the first plans."""
TIMED_STEPS = 3
_OUT_OF_MEMORY = "can't allocate memory"
_TIMEOUT_S = 3600.0
_DIED: dict[str, Any] = {"losses": [], "seconds": [], "peak_bytes": 0, "records": []}


def measure(is_quick: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """Figures, bounds and met requirements."""
    console = Console(stderr=True)
    shapes = [REFERENCE, UNEQUAL_HEADS, LONG, FEW_BIG_EXPERTS]
    if is_quick:
        shapes = [quick(REFERENCE)]
    figures: dict[str, Any] = {}
    for number, shape in enumerate(shapes):
        num_rounds = 3 if number < 2 and not is_quick else 1
        compared = _compare(shape, num_rounds, console)
        figures |= {f"{shape.name}/{key}": value for key, value in compared.items()}
        # What comes next takes long, and may fail.
        console.print(*(f"{key} {value:.3f}" for key, value in compared.items() if key.endswith("_ratio")), sep=", ")
    figures |= {f"varied/{key}": value for key, value in _vary(shapes[0], 24 if is_quick else 300, console).items()}
    return figures, dict(BOUNDS), _meets(figures, shapes[0].name)


def _meets(figures: dict[str, Any], name: str) -> dict[str, bool]:
    def figure(key: str) -> Any:
        return figures[f"{name}/{key}"]

    return {
        "1": figure("plain_dies_at_cap") and figure("flex_finishes_at_cap") and figure("losses_are_bit_equal"),
        "2": figure("cap_vs_checkpoint_step_ratio") <= BOUNDS["cap_vs_checkpoint_step_ratio"]
        and figure("cap_vs_plain_step_ratio") <= BOUNDS["cap_vs_plain_step_ratio"],
        "3": figure("ample_vs_plain_step_ratio") <= BOUNDS["ample_vs_plain_step_ratio"]
        and figure("ample_losses_are_bit_equal"),
        "4": figures["varied/finishes"]
        and figures["varied/num_over_limit"] == 0
        and figures["varied/peak_vs_limit"] <= BOUNDS["peak_vs_limit"]
        and figures["varied/use_of_limit_under_demand"] >= BOUNDS["use_of_limit_under_demand"],
        "peers": all(value for key, value in figures.items() if key.endswith("_losses_are_equal")),
        "5": figure("flex_finishes_at_cap")
        and figure("plan_share") < BOUNDS["plan_share"]
        and figures["varied/plan_share"] < BOUNDS["plan_share"],
    }


def _compare(shape: BenchShape, num_rounds: int, console: Console) -> dict[str, Any]:
    """Requirements 1, 2, 3 and 5 for one shape."""
    lengths = [shape.sequence_length] * (WARM_UP_STEPS + TIMED_STEPS)
    # Plain and checkpointing come first: in the first round their peaks set the cap.
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("plain", "checkpoint", "cap", "ample", *PEERS[2:])}
    options: dict[str, dict[str, Any]] = {**{name: {"side": name} for name in PEERS}, "ample": {"side": "flex"}}
    for number in range(num_rounds):
        for name in runs:
            if name == "cap" and number == 0:
                # The peaks of both extremes, in their first round, set the cap.
                plain_peak, checkpoint_peak = (runs[side][0]["peak_bytes"] for side in ("plain", "checkpoint"))
                cap_bytes = int(checkpoint_peak + CAP_SHARE * (plain_peak - checkpoint_peak))
                options["cap"] = {"side": "flex", "limit_bytes": cap_bytes, "enforce_bytes": cap_bytes}
            console.print(f"{shape.name}: round {number + 1} of {num_rounds}, {name}", highlight=False)
            result = _try(shape, lengths, **options[name])
            if name != "cap":  # whether FlexTrainer survives its cap is a figure, not a failure of the benchmark
                _refuse_failure(result, f"{shape.name}, {name}")
            runs[name].append(result.value or _DIED)
            if "unavailable" in runs[name][-1]:
                console.print(f"{name}: {runs[name][-1]['unavailable']}", highlight=False)
    console.print(f"{shape.name}: plain, and each strategy alone, under {cap_bytes / 2**20:.0f} MiB", highlight=False)
    dead = _try(shape, lengths, side="plain", enforce_bytes=cap_bytes)
    alone = [
        _try(shape, lengths[:WARM_UP_STEPS], **options["cap"], strategies=[name]).value or _DIED
        for name in ("recompute", "offload")
    ]
    core = {name: _median_seconds(done, "core_seconds") for name, done in runs.items()}
    step = {name: _median_seconds(done) for name, done in runs.items()}
    records = [record for run in runs["cap"] for record in run["records"]]
    planned = [record for record in records if not record["is_profile"]]
    losses = runs["plain"][0]["losses"]
    return {
        "plain_peak_mib": plain_peak / 2**20,
        "checkpoint_peak_mib": checkpoint_peak / 2**20,
        "cap_mib": cap_bytes / 2**20,
        "cap_peak_mib": max(run["peak_bytes"] for run in runs["cap"]) / 2**20,
        "plain_dies_at_cap": dead.exit_code != 0 and _OUT_OF_MEMORY in dead.error,
        "flex_finishes_at_cap": all(len(run["losses"]) == len(lengths) for run in runs["cap"]),
        "losses_are_bit_equal": all(run["losses"] == losses for run in runs["cap"])
        and all(run["losses"] == losses[:WARM_UP_STEPS] for run in alone),
        "ample_losses_are_bit_equal": all(run["losses"] == losses for run in runs["ample"]),
        **{f"{name}_step_s": step[name] for name in ("plain", "checkpoint", "cap", "ample")},
        **_peer_figures(runs, losses, console, shape.name),
        "cap_vs_checkpoint_step_ratio": step["cap"] / step["checkpoint"],
        "cap_vs_plain_step_ratio": step["cap"] / step["plain"],
        "ample_vs_plain_step_ratio": step["ample"] / step["plain"],
        "plain_vs_checkpoint_step_ratio": step["plain"] / step["checkpoint"],
        # Of all cores, not of the clock: what a machine with other work still tells.
        "cap_vs_checkpoint_core_ratio": core["cap"] / core["checkpoint"],
        "ample_vs_plain_core_ratio": core["ample"] / core["plain"],
        **{
            f"freed_{strategy}_mib": max((r["freed_bytes"][strategy] for r in planned), default=0) / 2**20
            for strategy in ("recompute", "offload")
        },
        "prediction_error_percent": _prediction_error_percent(records),
        "plan_share": _plan_share(records),
    }


def _median_seconds(runs: list[dict[str, Any]], clock: str = "seconds") -> float:
    return statistics.median([seconds for run in runs for seconds in run.get(clock, ())[WARM_UP_STEPS:]] or [math.inf])


def _peer_figures(
    runs: dict[str, list[dict[str, Any]]], losses: list[float], console: Console, title: str
) -> dict[str, Any]:
    """Peak and time of all ways side by side: printed as a table, and as figures. One that cannot run here says why."""
    table = Table("way", "peak MiB", "step s", "step / plain", title=title, title_justify="left")
    plain_seconds = _median_seconds(runs["plain"])
    figures: dict[str, Any] = {}
    for name, done in runs.items():
        if "unavailable" in done[0]:
            figures[f"peer_{name}"] = done[0]["unavailable"]
            table.add_row(name, "", "", done[0]["unavailable"])
            continue
        peak_mib, seconds = max(run["peak_bytes"] for run in done) / 2**20, _median_seconds(done)
        table.add_row(name, f"{peak_mib:,.0f}", f"{seconds:.3f}", f"{seconds / plain_seconds:.3f}")
        if name in PEERS:
            figures[f"peer_{name}_peak_mib"], figures[f"peer_{name}_step_s"] = peak_mib, seconds
            figures[f"peer_{name}_losses_are_equal"] = all(run["losses"] == losses for run in done)
    console.print(table)
    return figures


def _vary(shape: BenchShape, num_micro_batches: int, console: Console) -> dict[str, Any]:
    """Requirement 4: lengths from 1x to 8x under a real cap that the longest would pass if all were kept."""
    shape = replace(shape, batch_size=max(shape.batch_size // 2, 1))
    longest, shortest = shape.sequence_length, shape.sequence_length // 8
    console.print(f"varied lengths: peaks at {longest} tokens", highlight=False)
    full = [longest] * 3
    plain_peak, checkpoint_peak = (_run(shape, full, side=side)["peak_bytes"] for side in ("plain", "checkpoint"))
    limit_bytes = int(checkpoint_peak + CAP_SHARE * (plain_peak - checkpoint_peak))
    lengths = varied_lengths(num_micro_batches, shortest, longest, seed=0)
    console.print(
        f"varied lengths: {num_micro_batches} micro-batches of {shortest} to {longest} tokens", highlight=False
    )
    run = _try(shape, lengths, side="flex", limit_bytes=limit_bytes, enforce_bytes=limit_bytes).value or _DIED
    records = run["records"]
    # Demand above the limit: keeping everything would have passed it. The first of its kind only measures.
    pressed = [r for r in records if r["is_spike"] and not r["is_profile"]]
    uses = [record["peak_bytes"] / record["limit_bytes"] for record in pressed]
    return {
        "num_micro_batches": len(records),
        "finishes": len(records) == num_micro_batches,
        "num_spikes": len(pressed),
        "limit_mib": limit_bytes / 2**20,
        "peak_mib": run["peak_bytes"] / 2**20,
        "peak_vs_limit": run["peak_bytes"] / limit_bytes,
        "num_over_limit": sum(record["peak_bytes"] > record["limit_bytes"] for record in records),
        "use_of_limit_under_demand": statistics.median(uses) if uses else 0.0,
        "least_use_of_limit_under_demand": min(uses, default=0.0),
        "prediction_error_percent": _prediction_error_percent(records),
        "plan_share": _plan_share(records),
    }


def _plan_share(records: list[dict[str, Any]]) -> float:
    return sum(record["plan_ms"] for record in records) / max(sum(record["step_ms"] for record in records), 1e-9)


def _prediction_error_percent(records: list[dict[str, Any]]) -> float:
    """Mean error of the predicted activation bytes."""
    planned = [record for record in records if not record["is_profile"]]
    errors = [abs(r["predicted_bytes"] - r["actual_bytes"]) / r["actual_bytes"] for r in planned]
    return 100 * statistics.mean(errors) if errors else 0.0


def _run(shape: BenchShape, lengths: list[int], **options: Any) -> dict[str, Any]:
    result = _try(shape, lengths, **options)
    _refuse_failure(result, f"{shape.name} {options}")
    return result.value


def _refuse_failure(result: SubprocessResult, name: str) -> None:
    if result.exit_code != 0:
        error = result.error or f"exit code {result.exit_code}"
        raise RuntimeError(f"{name} ended with {error}: {result.stderr[-2000:]}")


def _try(shape: BenchShape, lengths: list[int], **options: Any) -> SubprocessResult:
    arguments = {
        "architecture": shape.architecture,
        "config": shape.config,
        "batch_size": shape.batch_size,
        "lengths": lengths,
        **options,
    }
    return run_in_subprocess("flex_trainer.bench.child:train", arguments, timeout_s=_TIMEOUT_S)
