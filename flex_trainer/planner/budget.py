"""Algorithm 1 of BaGuaLu-2 (section V-A): the activation budget of the next micro-batch.

    warm-up i < W:   r = W - i;  budget = (M_max - U - r M0) / r + M0;  run;  U += actual
    steady  i >= W:  U -= actual[i - W];  budget = M_max - U;           run;  U += actual

M_max is the limit, U what is in use, M0 the least a micro-batch can hold (everything recomputed), W the number of
micro-batches in flight before the first backward. Replacing the budget by the actual bytes keeps an error from
cascading. With W = 1 (no pipeline) this is what is left of the limit.
"""

from __future__ import annotations


class BudgetAllocator:
    """Hands out budgets in bytes, one micro-batch after the other."""

    def __init__(self, num_warmup: int = 1) -> None:
        if num_warmup < 1:
            raise ValueError(f"num_warmup={num_warmup} must be at least 1: one micro-batch is always in flight")
        self._num_warmup = num_warmup
        self._in_flight: dict[int, int] = {}

    @property
    def in_flight_bytes(self) -> int:
        """Activation bytes of the micro-batches between their forward and their backward."""
        return sum(self._in_flight.values())

    def next(self, limit_bytes: int, other_bytes: int, minimum_bytes: int) -> int:
        """The budget of the next micro-batch; it may be negative when nothing is left.

        Args:
            limit_bytes: M_max.
            other_bytes: bytes in use that are not activations of micro-batches in flight.
            minimum_bytes: M0.
        """
        remaining = max(self._num_warmup - len(self._in_flight), 1)
        left_bytes = limit_bytes - other_bytes - self.in_flight_bytes
        return (left_bytes - remaining * minimum_bytes) // remaining + minimum_bytes

    def commit(self, micro_batch: int, actual_bytes: int) -> None:
        """Forward ended: U += actual."""
        self._in_flight[micro_batch] = actual_bytes

    def release(self, micro_batch: int) -> None:
        """Backward ended: U -= actual."""
        self._in_flight.pop(micro_batch, None)
