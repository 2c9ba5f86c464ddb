"""`flex-trainer bench host`: what the engine and the planner cost the host on a deep model.

Tensors are tiny, so all time is Python and launches: what a GPU waits for when its kernels are short. CPU time of the
process, one thread, sides in turns, medians over rounds, with the cyclic collector on and off.

    requirement 1   nothing mitigated: forward and backward against plain, and time per operator
    requirement 2   a recomputed region, on top of its kernels
    requirement 3   2,000 micro-batches: memory and records stay flat
    requirement 4   planning: everything that the planner does in a micro-batch
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn

from flex_trainer.activations.context import scope_is
from flex_trainer.activations.overhead import recompute_overhead_seconds
from flex_trainer.bench.host_growth import growth
from flex_trainer.bench.host_planning import planning
from flex_trainer.config import FlexConfig
from flex_trainer.models.discovery import discover
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.forced import ForcedRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model

BOUNDS = {
    "forward_ratio": 1.15,
    "backward_ratio": 1.15,
    "us_per_operator": 40.0,
    "region_us": 150.0,
    "growth_bytes_per_micro_batch": 64.0,
    "growth_records": 0,
    "hit_ms": 0.3,
    "new_length_ms": 3.0,
    "cold_ms": 20.0,
    "replan_ms": 10.0,
}
ARCHITECTURES = ("deepseek_v3", "qwen3_moe")
_DEPTH, _QUICK_DEPTH = 60, 4
_ROUNDS, _QUICK_ROUNDS = 15, 2
_WARM_UP_ROUNDS, _QUICK_WARM_UP_ROUNDS = 20, 3
"""Until it has settled which micro-batches are watched."""
_BATCH_SIZE, _LENGTH = 1, 8


def measure(is_quick: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """Figures, bounds and met requirements."""
    console = Console(stderr=True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    try:
        for architecture in ARCHITECTURES:
            for is_collecting in (True, False):
                console.print(f"{architecture}, cyclic collector {'on' if is_collecting else 'off'}", style="dim")
                key = f"{architecture}, gc {'on' if is_collecting else 'off'}"
                figures[key] = _phases(architecture, is_quick, is_collecting)
        console.print("planning", style="dim")
        figures["planning"] = planning(num_layers=6 if is_quick else 64)
        console.print("growth", style="dim")
        figures["growth"] = growth(num_micro_batches=60 if is_quick else 2000)
    finally:
        torch.set_num_threads(num_threads)
    return figures, BOUNDS, meets(figures)


def meets(figures: dict[str, Any]) -> dict[str, bool]:
    """Which requirements are met, by number."""
    sides = [figure for key, figure in figures.items() if key.startswith(ARCHITECTURES)]
    kept = ("forward_ratio", "backward_ratio", "us_per_operator")
    return {
        "1": all(side[name] <= BOUNDS[name] for side in sides for name in kept),
        "2": all(side["region_us"] <= BOUNDS["region_us"] for side in sides),
        "3": all(figures["growth"][name] <= BOUNDS[f"growth_{name}"] for name in ("bytes_per_micro_batch", "records")),
        "4": all(
            figures["planning"][name] <= BOUNDS[name] for name in ("hit_ms", "new_length_ms", "cold_ms", "replan_ms")
        ),
    }


@dataclass(frozen=True)
class _Seconds:
    """CPU time of one forward and backward."""

    forward: float
    backward: float


def _phases(architecture: str, is_quick: bool, is_collecting: bool) -> dict[str, float]:
    num_layers, num_rounds = (_QUICK_DEPTH, _QUICK_ROUNDS) if is_quick else (_DEPTH, _ROUNDS)
    num_warm_up_rounds = _QUICK_WARM_UP_ROUNDS if is_quick else _WARM_UP_ROUNDS
    plain = tiny_model(architecture, num_hidden_layers=num_layers)
    batch = tiny_batch(plain, _BATCH_SIZE, _LENGTH)
    kept, recomputed = copy.deepcopy(plain), copy.deepcopy(plain)
    runtime = FlexRuntime(FlexConfig(memory_limit="auto"))
    regions = ForcedRuntime(_EveryOperator())
    runtime.attach(kept)
    regions.attach(recomputed)
    sides: dict[str, Callable[[], _Seconds]] = {
        "plain": lambda: _step(plain, batch, contextlib.nullcontext),
        "kept": lambda: _step(kept, batch, runtime.backward),
        "recomputed": lambda: _step(recomputed, batch, regions.backward),
    }
    runs: dict[str, list[_Seconds]] = {name: [] for name in sides}
    try:
        with collector(is_collecting):
            for number in range(num_warm_up_rounds + num_rounds):
                for name in list(sides)[:: 1 if number % 2 else -1]:  # no side is always first
                    if not is_collecting:
                        gc.collect()
                    seconds = sides[name]()
                    if number >= num_warm_up_rounds:
                        runs[name].append(seconds)
    finally:
        runtime.detach()
        regions.detach()
    timer = _operators_alone(plain, batch)
    forward, backward = (
        {name: statistics.median(getattr(run, phase) for run in of) for name, of in runs.items()}
        for phase in ("forward", "backward")
    )
    extra = forward["kept"] + backward["kept"] - forward["plain"] - backward["plain"]
    in_regions = forward["recomputed"] + backward["recomputed"] - forward["plain"] - backward["plain"]
    return {
        "num_operators": timer.num_operators,
        "num_regions": timer.num_regions,
        "forward_ms": forward["kept"] * 1e3,
        "plain_forward_ms": forward["plain"] * 1e3,
        "forward_ratio": forward["kept"] / forward["plain"],
        "backward_ms": backward["kept"] * 1e3,
        "plain_backward_ms": backward["plain"] * 1e3,
        "backward_ratio": backward["kept"] / backward["plain"],
        "mean_forward_ratio": _mean_ratio(runs, "forward"),
        "mean_backward_ratio": _mean_ratio(runs, "backward"),
        "us_per_operator": extra * 1e6 / timer.num_operators,
        "recomputed_forward_ms": forward["recomputed"] * 1e3,
        "recomputed_backward_ms": backward["recomputed"] * 1e3,
        "kernels_of_regions_ms": timer.seconds * 1e3,
        "region_us": (in_regions - timer.seconds) * 1e6 / timer.num_regions,
        "one_norm_region_us": recompute_overhead_seconds(torch.device("cpu"), time.process_time) * 1e6,
    }


def _mean_ratio(runs: dict[str, list[_Seconds]], phase: str) -> float:
    """Of means: with the rounds in which every saved tensor is looked at."""
    kept, plain = (statistics.mean(getattr(run, phase) for run in runs[side]) for side in ("kept", "plain"))
    return kept / plain


def _step(model: nn.Module, batch: dict[str, Any], around: Callable[[], Any]) -> _Seconds:
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(**batch).loss
    middle = time.process_time()
    with around():
        loss.backward()
    return _Seconds(middle - start, time.process_time() - middle)


@contextlib.contextmanager
def collector(is_on: bool) -> Iterator[None]:
    """The cyclic collector on or off inside, whatever it was."""
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()


class _EveryOperator:
    """Recompute for every operator that allows it; blocks are kept, so that each operator is a region of its own."""

    def strategy(self, site: Site) -> Strategy:
        return Strategy.KEEP if site.is_block or not site.is_recomputable else Strategy.RECOMPUTE


class _Timer:
    """Stands for a scope: times the operators that `_EveryOperator` recomputes, in a plain forward."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_operators = self.num_regions = 0
        self.is_watching = True

    def run(self, site: Site, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.num_operators += 1
        if _EveryOperator().strategy(site) is Strategy.KEEP:
            return function(*args, **kwargs)
        self.num_regions += 1
        start = time.process_time()
        result = function(*args, **kwargs)
        self.seconds += time.process_time() - start
        return result

    def begin_unwatched(self, site: Site) -> bool:
        return False

    def is_on_top(self) -> bool:
        return True

    def sweep(self) -> None:
        """A layer has ended."""


def _operators_alone(model: nn.Module, batch: dict[str, Any]) -> _Timer:
    """The operators of one plain forward, and their own time: the least of three runs."""
    instrumentation = Instrumentation(model, discover(model))
    timers = []
    try:
        for _ in range(3):
            timers.append(_Timer())
            with scope_is(timers[-1]):  # pyright: ignore[reportArgumentType]
                model(**batch)
    finally:
        instrumentation.remove()
    return min(timers, key=lambda timer: timer.seconds)
