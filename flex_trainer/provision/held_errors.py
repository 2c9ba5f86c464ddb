"""What micro-batches hold beyond what was predicted: an error that comes back is learnt from.

Sizes are learnt from every run. What is left are values that a plan counts as freed and that a run keeps: they were not
finite and so not quantized, or could not be recomputed where they were wanted. Such an error belongs to the kind of
batch and grows with its tokens. The first may be an accident; from the second on, room is kept for the largest one seen
recently.
"""

from __future__ import annotations

from collections import deque

from flex_trainer.cost.shape import BatchShape

_SHARE = 0.01
"""Errors below this share of what is held are noise."""
_REMEMBERED = 16
_MAX_KINDS = 64


class HeldErrors:
    """Errors of recent micro-batches, by kind, in bytes per token."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, bool], deque[float]] = {}

    def expected_bytes(self, shape: BatchShape) -> int:
        """Bytes that a micro-batch of this shape is expected to hold beyond what a plan says."""
        recent = self._recent.get((shape.kind, shape.has_padding), ())
        if sum(rate > 0 for rate in recent) < 2:
            return 0
        return int(max(recent) * shape.num_tokens)

    def observe(self, shape: BatchShape, predicted_bytes: int, actual_bytes: int) -> None:
        """A micro-batch has ended its forward.

        Args:
            predicted_bytes: what its plan said, without `expected_bytes`.
            actual_bytes: what it held.
        """
        excess_bytes = actual_bytes - predicted_bytes
        rate = excess_bytes / max(shape.num_tokens, 1) if excess_bytes > _SHARE * actual_bytes else 0.0
        key = shape.kind, shape.has_padding
        if key not in self._recent:
            if not rate:
                return
            if len(self._recent) >= _MAX_KINDS:
                del self._recent[next(iter(self._recent))]
            self._recent[key] = deque(maxlen=_REMEMBERED)
        self._recent[key].append(rate)
