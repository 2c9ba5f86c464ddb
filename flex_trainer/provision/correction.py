"""How far off the cost model's transients are: learnt from measured peaks."""

from __future__ import annotations

import math
from collections import deque

from flex_trainer.planner.plan import Plan


class Correction:
    """How large transients really are, over what the cost model says. What is held needs no correction: it is exact."""

    _FIRST_GUESS = 1.5
    _FIRST_GUESS_TRACED = 1.05
    _REMEMBERED = 64
    _LOWEST, _HIGHEST = 0.5, 8.0
    _SMALL_SHARE = 0.25
    _STEPS = 50  # per 1.0: a factor that does not jitter lets plans be found in the cache

    def __init__(self) -> None:
        self._is_from_earlier_run = False
        self._seen: deque[tuple[int, float]] = deque(maxlen=self._REMEMBERED)  # (predicted peak, factor)
        self.factor = self._FIRST_GUESS

    def start_at(self, factor: float | None) -> None:
        """Begin with the factor of an earlier run."""
        if factor is not None:
            self.factor = factor
            self._is_from_earlier_run = True

    def trust_trace(self) -> None:
        """Transients are known from a trace on shapes alone: before anything was measured, little is added to them."""
        if not self._seen and not self._is_from_earlier_run:
            self.factor = min(self.factor, self._FIRST_GUESS_TRACED)

    def observe(self, plan: Plan, measured_bytes: int, is_exact: bool, room_bytes: int = 0) -> None:
        """Compare a plan (made with the present factor) with the measured peak above the baseline.

        A peak that is only known to be at least so high (`is_exact` false) can raise the factor, never lower it. One
        that is small against `room_bytes`, what there was room for, cannot raise it above the first guess: it is mostly
        costs that do not grow (libraries that load, an allocator's pages), and would call a large batch impossible.
        """
        modelled_bytes = plan.transient_bytes / self.factor
        if modelled_bytes <= 0:
            return
        factor = (measured_bytes - (plan.peak_bytes - plan.transient_bytes)) / modelled_bytes
        if not is_exact and factor <= self.factor:
            return
        is_small = plan.peak_bytes < self._SMALL_SHARE * room_bytes
        highest = self._FIRST_GUESS if is_small else self._HIGHEST
        self._seen.append((plan.peak_bytes, min(max(factor, self._LOWEST), highest)))
        # The largest factor seen lately, among peaks of the size that matters: small ones are mostly constant costs.
        largest = max(predicted for predicted, _ in self._seen)
        worst = max(factor for predicted, factor in self._seen if predicted >= largest / 2)
        self.factor = math.ceil(worst * self._STEPS) / self._STEPS
