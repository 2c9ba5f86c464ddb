"""How the size of a value follows the shape of a batch, found by elimination.

A saved tensor's number of elements is a coefficient times one of a few units: 1, B, S, B S, S^2, B S^2 (B sequences of S
tokens). From one shape several units may fit (S may happen to divide the hidden size); every further shape eliminates those
that do not. A prediction is the largest over the units still standing: exact as soon as one is left, and never too small
for a batch longer than any seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def units(batch_size: int, sequence_length: int) -> np.ndarray:
    """The candidate units at this shape, as a vector."""
    b, s = batch_size, sequence_length
    return np.array([1, b, s, b * s, s * s, b * s * s], dtype=np.float64)


_TOKENS = 3  # index of the unit B S


class Scaling:
    """Sizes in bytes of a fixed list of values, over shapes."""

    def __init__(self, element_bytes: Sequence[int]) -> None:
        self._element_bytes = np.array(element_bytes, dtype=np.float64)
        self._shapes: dict[tuple[int, int], np.ndarray] = {}
        self._stands: np.ndarray | None = None  # (units, values): not eliminated yet
        self._coefficients: np.ndarray | None = None  # (units, values), in elements
        self._envelope = np.zeros(len(element_bytes))  # most elements per token seen

    @property
    def element_bytes(self) -> list[int]:
        return [int(size) for size in self._element_bytes]

    def observe(self, batch_size: int, sequence_length: int, value_bytes: Sequence[int]) -> None:
        """Learn the sizes at one shape."""
        shape = (batch_size, sequence_length)
        sizes = np.array(value_bytes, dtype=np.float64)
        if shape in self._shapes:
            self._shapes[shape] = np.maximum(self._shapes[shape], sizes)
            return
        self._shapes[shape] = sizes
        elements = sizes / self._element_bytes
        shape_units = units(*shape)
        coefficients = elements[None, :] / shape_units[:, None]
        fits = coefficients == np.round(coefficients)
        if self._coefficients is not None and self._stands is not None:
            fits &= self._stands & np.isclose(coefficients, self._coefficients, rtol=1e-9)
        self._coefficients, self._stands = coefficients, fits
        self._envelope = np.maximum(self._envelope, coefficients[_TOKENS])

    def predict(self, batch_size: int, sequence_length: int) -> np.ndarray:
        """Bytes of every value at this shape; int64."""
        known = self._shapes.get((batch_size, sequence_length))
        if known is not None:
            return known.astype(np.int64)
        assert self._coefficients is not None and self._stands is not None, "predict comes after observe"
        shape_units = units(batch_size, sequence_length)
        candidates = np.where(self._stands, self._coefficients * shape_units[:, None], -1.0).max(axis=0)
        fallback = self._envelope * shape_units[_TOKENS]
        elements = np.where(candidates >= 0, candidates, fallback)
        return np.ceil(elements * self._element_bytes).astype(np.int64)
