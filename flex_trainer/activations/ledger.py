"""Counts the bytes that the engine holds, so that every number in a report was counted and not guessed. Counts the
time of copies and recomputes as well: what mitigations cost is learnt from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class CopyTime(NamedTuple):
    """What one copy took."""

    num_bytes: int
    seconds: float
    """From its start to its end, on the thread that made it."""
    core_seconds: float
    """Of these, the time that the thread was on a core: it was taken from what else the machine computes."""


class Ledger:
    """Bytes of one micro-batch, by what became of them. Thread-safe: backward may run in other threads."""

    def __init__(self) -> None:
        # Reentrant: a value that dies inside one of these methods reports to the same ledger.
        self._lock = threading.RLock()
        self.demand_bytes = 0
        """Unique storage bytes that autograd would have held had everything been kept."""
        self.held_bytes = 0
        """Device bytes held now by packed values and by the inputs of operators that may be recomputed."""
        self.recovered_bytes = 0
        """Device bytes held now by values that came back (recomputed, reloaded, cast) for backward."""
        self.freed_bytes = {"recompute": 0, "offload": 0, "quantize": 0}
        """Bytes not held because of each strategy, over the whole forward."""
        self.num_recomputes = 0
        self.recompute_seconds = 0.0
        """Host time of recomputation, without the waiting for copies inside them. On CUDA a launch says nothing."""
        self.wait_seconds = 0.0
        """Host time spent waiting for copies: for room in flight, for the end of forward, for values coming back."""
        self.num_offloaded = 0
        """Values that were moved to the lower tier."""
        self.copies: list[CopyTime] = []
        """Copies that have ended and whose time is known."""
        self._recompute_depth = 0
        self._away_seconds = 0.0
        self.num_unmanaged = 0
        """Saved tensors of kinds the engine does not understand (tensor subclasses): kept, and reported."""

    def demand(self, num_bytes: int) -> None:
        self.demand_bytes += num_bytes

    def freed(self, strategy: str, num_bytes: int) -> None:
        with self._lock:
            self.freed_bytes[strategy] += num_bytes

    def hold(self, num_bytes: int) -> None:
        with self._lock:
            self.held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= num_bytes

    def recover(self, num_bytes: int) -> None:
        with self._lock:
            self.recovered_bytes += num_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for a copy."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.wait_seconds += time.perf_counter() - start

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Count the time inside as recomputation. One may need another, which then is part of it."""
        with self._lock:
            self._recompute_depth += 1
            start, waited_seconds = time.perf_counter(), self.wait_seconds + self._away_seconds
        try:
            yield
        finally:
            with self._lock:
                self._recompute_depth -= 1
                if self._recompute_depth == 0:
                    seconds = time.perf_counter() - start
                    others_seconds = self.wait_seconds + self._away_seconds - waited_seconds
                    self.recompute_seconds += max(seconds - others_seconds, 0.0)

    def leave_out(self, seconds: float) -> None:
        """Another micro-batch has run for so long, in whatever this one was doing."""
        with self._lock:
            self._away_seconds += seconds
