"""`flex-trainer bench survive`: nothing that happens to memory may end a run, or change its result.

    requirement 4   2,000 random micro-batches (lengths, skews, budgets, strategies, evaluation in between) under a real
                    cap: no peak over the limit, all losses those of the plain run, nothing held afterwards although the
                    cyclic garbage collector is off
    requirement 5   allocations that fail at 200 random points of forward, backward, recovery and offload: every run
                    ends with the weights of one in which none failed

Everything runs on the CPU, on one thread, with deterministic algorithms, in fresh processes, two at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rich.console import Console

from flex_trainer.testing.failures import PLACES
from flex_trainer.testing.processes import SubprocessResult, run_in_subprocess

BOUNDS = {"num_micro_batches": 2000.0, "num_points": 200.0}
_TIMEOUT_S = 7200.0
_NUM_PROCESSES = 2
_CHILD = "flex_trainer.bench.survive_child"


def measure(is_quick: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """Figures, bounds and met requirements."""
    console = Console(stderr=True)
    with ThreadPoolExecutor(_NUM_PROCESSES) as pool:
        random = _random_micro_batches(pool, 2 if is_quick else 40, 12 if is_quick else 50, console)
        injected = _injected_failures(pool, 1 if is_quick else 50, console)
        figures = {**random(), **injected()}
    bounds = {"num_micro_batches": 24.0, "num_points": 4.0} if is_quick else dict(BOUNDS)
    return figures, bounds, _meets(figures, bounds)


def _meets(figures: dict[str, Any], bounds: dict[str, float]) -> dict[str, bool]:
    return {
        "4": figures["random/num_micro_batches"] >= bounds["num_micro_batches"]
        and figures["random/finishes"]
        and figures["random/num_over_limit"] == 0
        and figures["random/num_unequal_losses"] == 0
        and figures["random/live_packed_bytes"] == 0,
        "5": figures["injected/num_points"] >= bounds["num_points"] and figures["injected/num_unequal"] == 0,
    }


def _start(pool: ThreadPoolExecutor, function: str, arguments: dict[str, Any]) -> Future[SubprocessResult]:
    return pool.submit(run_in_subprocess, f"{_CHILD}:{function}", arguments, timeout_s=_TIMEOUT_S)


def _random_micro_batches(
    pool: ThreadPoolExecutor, num_runs: int, num_per_run: int, console: Console
) -> Callable[[], dict[str, Any]]:
    """Start the two sides; returns what waits for them and compares."""
    console.print(f"{num_runs} runs of {num_per_run} random micro-batches, plain and under caps", highlight=False)
    arguments = {"num_runs": num_runs, "num_per_run": num_per_run}
    flex, plain = (_start(pool, "random_micro_batches", {**arguments, "is_flex": is_flex}) for is_flex in (True, False))
    return lambda: _compared(plain.result(), flex.result(), num_runs * num_per_run)


def _compared(plain: SubprocessResult, flex: SubprocessResult, num_micro_batches: int) -> dict[str, Any]:
    if plain.value is None:
        raise RuntimeError(f"the plain run ended with {plain.error or plain.exit_code}: {plain.stderr[-2000:]}")
    empty = {"losses": [], "num_over": 0, "live_bytes": 0, "num_spikes": 0, "num_retries": 0}
    ours, theirs = (flex.value or empty), plain.value
    pairs = zip(ours["losses"], theirs["losses"], strict=False)
    return {
        "random/num_micro_batches": num_micro_batches,
        "random/finishes": flex.exit_code == 0 and len(ours["losses"]) == len(theirs["losses"]),
        "random/error": flex.error,
        "random/num_over_limit": ours["num_over"],
        "random/num_unequal_losses": sum(mine != other for mine, other in pairs),
        "random/live_packed_bytes": ours["live_bytes"],
        "random/num_spikes": ours["num_spikes"],
        "random/num_steps_run_again": ours["num_retries"],
    }


def _injected_failures(
    pool: ThreadPoolExecutor, num_points_each: int, console: Console
) -> Callable[[], dict[str, Any]]:
    """Start a process for each place; returns what waits for them and counts."""
    console.print(f"{num_points_each} failures in each of {', '.join(PLACES)}", highlight=False)
    started = {
        where: _start(pool, "injected_failures", {"where": where, "num_points": num_points_each}) for where in PLACES
    }
    return lambda: _counted({where: future.result() for where, future in started.items()}, num_points_each)


def _counted(results: dict[str, SubprocessResult], num_points_each: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"injected/num_points": 0, "injected/num_unequal": 0}
    for where, result in results.items():
        # A run that ends with an error is a missed requirement, not a failure of the benchmark.
        counted = result.value or {"num_points": num_points_each, "num_unequal": num_points_each}
        figures[f"injected/{where}_error"] = result.error
        figures["injected/num_points"] += counted["num_points"]
        figures["injected/num_unequal"] += counted["num_unequal"]
    return figures
