"""How the size of a value follows the shape of a batch, found by elimination.

A saved tensor's number of elements is a coefficient times one of a few units: 1, B, S, B S, S^2, B S^2 (B sequences
of S tokens), B (S + 1) (labels padded for the shift), B S (S + 1) (attention with a sink). From one shape several
units may fit (S may happen to divide the hidden size); every further shape eliminates those that do not. A prediction
is the largest over the units still standing: exact as soon as one is left, and never too small for a batch longer
than any seen.

A value that follows none of them (chunks of a fixed length, for example) is predicted from the most elements per token
seen; where those grew with S, from the most elements per S^2 for batches longer than any seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def units(batch_size: int, sequence_length: int) -> np.ndarray:
    """The candidate units at this shape, as a vector."""
    b, s = batch_size, sequence_length
    return np.array([1, b, s, b * s, s * s, b * s * s, b * (s + 1), b * s * (s + 1)], dtype=np.float64)


_TOKENS, _PAIRS = 3, 5  # indices of the units B S and B S^2
_MAX_SHAPES = 256
"""Shapes of which the sizes are remembered as they were; those of others follow from the units."""
_SURE_SHARE = 0.01
"""Sizes are sure when the units still standing differ by less than this share of all bytes."""


class Scaling:
    """Sizes in bytes of a fixed list of values, over shapes."""

    def __init__(self, element_bytes: Sequence[int]) -> None:
        self._element_bytes = np.array(element_bytes, dtype=np.float64)
        self._shapes: dict[tuple[int, int], np.ndarray] = {}
        self._stands: np.ndarray | None = None  # (units, values): not eliminated yet
        self._coefficients: np.ndarray | None = None  # (units, values), in elements
        # The one unit of each value and its coefficient, and the values of which several units still stand, or none.
        self._settled: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        # Of the latest shape that was asked for: whether it is sure is asked first, then the sizes.
        self._latest: tuple[tuple[int, int], tuple[np.ndarray, np.ndarray]] | None = None
        # For values that follow no unit: most elements per B S and per B S^2 seen, and elements per token at the
        # shortest and the longest sequence seen.
        self._per_token = np.zeros(len(element_bytes))
        self._per_pair = np.zeros(len(element_bytes))
        self._shortest: tuple[int, np.ndarray] | None = None
        self._longest: tuple[int, np.ndarray] | None = None

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
        if len(self._shapes) >= _MAX_SHAPES:
            del self._shapes[next(iter(self._shapes))]
        self._shapes[shape] = sizes
        elements = sizes / self._element_bytes
        shape_units = units(*shape)
        coefficients = elements[None, :] / shape_units[:, None]
        fits = coefficients == np.round(coefficients)
        if self._coefficients is not None and self._stands is not None:
            fits &= self._stands & np.isclose(coefficients, self._coefficients, rtol=1e-9)
        self._coefficients, self._stands, self._settled, self._latest = coefficients, fits, None, None
        self._per_token = np.maximum(self._per_token, coefficients[_TOKENS])
        self._per_pair = np.maximum(self._per_pair, coefficients[_PAIRS])
        if self._shortest is None or sequence_length < self._shortest[0]:
            self._shortest = sequence_length, coefficients[_TOKENS]
        if self._longest is None or sequence_length > self._longest[0]:
            self._longest = sequence_length, coefficients[_TOKENS]

    def predict(self, batch_size: int, sequence_length: int) -> np.ndarray:
        """Bytes of every value at this shape; int64."""
        known = self._shapes.get((batch_size, sequence_length))
        if known is not None:
            return known.astype(np.int64)
        largest, _ = self._candidates(batch_size, sequence_length)
        elements = np.where(largest >= 0, largest, self._fallback(batch_size, sequence_length))
        return np.ceil(elements * self._element_bytes).astype(np.int64)

    def is_sure(self, batch_size: int, sequence_length: int) -> bool:
        """Whether the sizes at this shape are known, and not only an upper bound: no unit that would make a difference
        is left to eliminate."""
        if (batch_size, sequence_length) in self._shapes:
            return True
        largest, smallest = self._candidates(batch_size, sequence_length)
        unsure_bytes = float(((largest - smallest) * self._element_bytes)[largest >= 0].sum())
        return unsure_bytes <= _SURE_SHARE * float(self.predict(batch_size, sequence_length).sum())

    def is_constant(self) -> np.ndarray:
        """For every value whether its size is known to be the same in all batches; bool."""
        assert self._stands is not None, "is_constant comes after observe"
        return self._stands[0] & (self._stands.sum(axis=0) == 1)

    def _candidates(self, batch_size: int, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Largest and smallest number of elements over the units still standing; the largest is -1 where none is. Not
        to be changed."""
        if self._latest is None or self._latest[0] != (batch_size, sequence_length):
            found = self._find_candidates(batch_size, sequence_length)
            self._latest = (batch_size, sequence_length), found
        return self._latest[1]

    def _find_candidates(self, batch_size: int, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
        assert self._coefficients is not None and self._stands is not None, "predict comes after observe"
        if self._settled is None:
            is_settled = (self._stands.sum(axis=0) == 1) | (self._stands.any(axis=0) & (self._per_token == 0))
            unit = self._stands.argmax(axis=0)
            coefficients = np.where(is_settled, self._coefficients[unit, np.arange(len(unit))], 0)
            self._settled = unit, coefficients, np.flatnonzero(~is_settled)
        unit, coefficients, open_ones = self._settled
        shape_units = units(batch_size, sequence_length)
        largest = coefficients * shape_units[unit]
        smallest = largest
        if len(open_ones):
            stands = self._stands[:, open_ones]
            elements = self._coefficients[:, open_ones] * shape_units[:, None]
            smallest = largest.copy()
            largest[open_ones] = np.where(stands, elements, -1.0).max(axis=0)
            smallest[open_ones] = np.where(stands, elements, np.inf).min(axis=0)
        return largest, smallest

    def _fallback(self, batch_size: int, sequence_length: int) -> np.ndarray:
        assert self._shortest is not None and self._longest is not None
        shape_units = units(batch_size, sequence_length)
        by_token = self._per_token * shape_units[_TOKENS]
        if sequence_length <= self._longest[0]:
            return by_token
        has_grown = self._longest[1] > self._shortest[1]
        return np.where(has_grown, np.maximum(by_token, self._per_pair * shape_units[_PAIRS]), by_token)
