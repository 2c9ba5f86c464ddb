"""Counts the bytes that the engine holds, so that every number in a report was counted and not guessed."""

from __future__ import annotations

import threading


class Ledger:
    """Bytes of one micro-batch, by what became of them. Thread-safe: backward may run in other threads."""

    def __init__(self) -> None:
        # Reentrant: a value that dies inside one of these methods reports to the same ledger.
        self._lock = threading.RLock()
        self.demand_bytes = 0
        """Unique storage bytes that autograd would have held had everything been kept."""
        self.held_bytes = 0
        """Device bytes held now by packed values and by the inputs of operators that may be replayed."""
        self.recovered_bytes = 0
        """Device bytes held now by values that came back (recomputed, reloaded, cast) for backward."""
        self.freed_bytes = {"recompute": 0, "offload": 0, "quantize": 0}
        """Bytes not held because of each strategy, over the whole forward."""
        self.num_replays = 0
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
