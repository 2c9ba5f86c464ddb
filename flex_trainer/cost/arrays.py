"""Costs of many choices as arrays. Letters of the shapes are those of `compiled.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.segment_cost import SegmentCost, ceil_bytes


@dataclass
class Tables:
    """Patterns with sizes and times. `K` is the strategy of an operator whose own values are not dropped."""

    held: np.ndarray
    """P: with nothing moved."""
    seconds: np.ndarray
    """P: with nothing moved."""
    heights: np.ndarray
    """P x 2n: on top of what is held, with nothing moved."""
    is_held: np.ndarray
    """P x m: the value is held, unless it is moved."""
    added_seconds: np.ndarray
    """K x P x n."""
    freed: np.ndarray
    """K x P x n: bytes that moving takes off what is held."""
    moved: np.ndarray
    """K x P x n: bytes that come back in backward."""
    shared: np.ndarray
    recomputed: np.ndarray

    def joined(self, other: Tables) -> Tables:
        """These patterns, then the others."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Tables(*(np.concatenate(pair, axis=1 if pair[0].ndim == 3 else 0) for pair in pairs))

    def rows(self, index: np.ndarray) -> Tables:
        """The patterns at some places."""
        return Tables(*(array[:, index] if array.ndim == 3 else array[index] for array in vars(self).values()))


@dataclass
class Costs:
    """`SegmentCost` of C choices."""

    held: np.ndarray
    seconds: np.ndarray
    backward: np.ndarray
    forward: np.ndarray
    offloaded: np.ndarray
    recompute_seconds: np.ndarray
    shared: np.ndarray
    """C x number of shared values."""

    @property
    def on_top(self) -> np.ndarray:
        """Bytes on top of what is held, forward or backward."""
        return np.maximum(self.backward, self.forward)

    @property
    def groups(self) -> np.ndarray:
        """Bit 0: something is offloaded; bit 1: some recompute takes a shared value."""
        return (self.offloaded > 0) * 1 + 2 * self.shared.any(axis=1)

    def one(self, number: int) -> SegmentCost:
        """One of the choices, without `transient_bytes`."""
        return SegmentCost(
            held_bytes=int(self.held[number]),
            added_seconds=float(self.seconds[number]),
            backward_bytes=ceil_bytes(self.backward[number]),
            forward_bytes=ceil_bytes(self.forward[number]),
            offloaded_bytes=int(self.offloaded[number]),
            recompute_seconds=float(self.recompute_seconds[number]),
            shared=frozenset(np.flatnonzero(self.shared[number]).tolist()),
        )

    def joined(self, other: Costs) -> Costs:
        """These choices, then the others."""
        return Costs(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def rows(self, index: np.ndarray) -> Costs:
        """The choices at some places."""
        return Costs(*(array[index] for array in vars(self).values()))
