"""Requirement 5 of `flex-trainer bench fused`: what planning an order takes."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from rich.console import Console

from flex_trainer.planner.fusion import Stage, Window
from flex_trainer.planner.fusion_cache import OrderCache
from flex_trainer.planner.fusion_order import plan_order

_FORWARD = (("gather", 1.5e-3, 0.6e-3), ("counts", 2.5e-3, 0.2e-3), ("dispatch", 0.4e-3, 3e-3), ("combine", 3e-3, 2e-3))
_BACKWARD = (("gather", 2e-3, 0.6e-3), ("dispatch", 1.5e-3, 2e-3), ("combine", 6e-3, 3e-3))
"""Stages of a layer, with seconds of computing and of the exchange: made up, of the size that both have on a GPU."""
_NUM_ROUNDS = 20
_NUM_FOUND = 2000


def measure_planning(console: Console) -> dict[str, Any]:
    """Median times of an order that was not known, at 8 and 60 layers, and of one that was; how often the search was
    completed."""
    console.print(f"planning: {_NUM_ROUNDS} windows of 8 and of 60 layers", highlight=False)
    figures: dict[str, Any] = {}
    for num_layers, num_rounds in ((8, _NUM_ROUNDS), (60, _NUM_ROUNDS // 4)):
        seconds, exact = [], 0
        for seed in range(num_rounds):
            window = _window(num_layers, seed)
            start = time.perf_counter()
            planned = plan_order(window, None)
            seconds.append(time.perf_counter() - start)
            exact += planned is not None and planned.is_exact
        name = "cold" if num_layers == 8 else f"cold_{num_layers}_layers"
        figures[f"{name}_ms"] = statistics.median(seconds) * 1e3
        figures[f"{name}_exact_share"] = exact / num_rounds
    cache = OrderCache(step_bytes=1)
    window = _window(8, 0)
    cache.find("a structure", None, lambda: window)
    start = time.perf_counter()
    for _ in range(_NUM_FOUND):
        cache.find("a structure", None, lambda: window)
    figures["found_ms"] = (time.perf_counter() - start) / _NUM_FOUND * 1e3
    return figures


def _window(num_layers: int, seed: int) -> Window:
    """Layers whose times differ by up to a third."""
    stream = random.Random(seed)

    def stages(kinds: tuple[tuple[str, float, float], ...]) -> tuple[Stage, ...]:
        return tuple(
            Stage(name, seconds * stream.uniform(1, 1.33), exchange * stream.uniform(1, 1.33))
            for _ in range(num_layers)
            for name, seconds, exchange in kinds
        )

    return Window(stages(_FORWARD), stages(_BACKWARD))
