"""How transient bytes of operators follow the size of a batch: interpolated between the shapes that were traced.

The transient of an operator is the largest of several sums of tensors, each of which grows with the batch in its own
way, so it follows no single unit. It is convex in the number of tokens: a straight line between two traced sizes is
never too low. Beyond the largest traced size the steepest growth seen goes on, at least in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TransientScaling:
    """Transient bytes of a fixed list of operators, over numbers of tokens."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}

    def observe(self, num_tokens: int, transient_bytes: Sequence[int]) -> None:
        """Learn them at one size; of two shapes with as many tokens, the larger."""
        sizes = np.array(transient_bytes, dtype=np.float64)
        earlier = self._known.get(num_tokens)
        self._known[num_tokens] = sizes if earlier is None else np.maximum(earlier, sizes)

    @property
    def is_empty(self) -> bool:
        return not self._known

    def predict(self, num_tokens: int) -> np.ndarray:
        """Bytes of every operator at this size; int64."""
        known = self._known.get(num_tokens)
        if known is None:
            known = self._between(num_tokens)
        return np.ceil(known).astype(np.int64)

    def _between(self, num_tokens: int) -> np.ndarray:
        sizes = sorted(self._known)
        above = next((size for size in sizes if size > num_tokens), None)
        below = max((size for size in sizes if size < num_tokens), default=None)
        if below is None:
            assert above is not None, "predict comes after observe"
            return self._known[above]  # smaller than any traced: no more than that one
        if above is not None:
            share = (num_tokens - below) / (above - below)
            return self._known[below] * (1 - share) + self._known[above] * share
        in_proportion = self._known[below] * (num_tokens / below)
        if len(sizes) == 1:
            return in_proportion
        before = sizes[-2]
        slope = (self._known[below] - self._known[before]) / (below - before)
        return np.maximum(in_proportion, self._known[below] + slope * (num_tokens - below))
