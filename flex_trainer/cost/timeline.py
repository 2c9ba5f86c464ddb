"""The memory timeline of one micro-batch: where its peak is, and how high.

Forward stacks what the segments hold. Backward takes it down again, last segment first; while a segment is in backward,
recovered values and gradients come on top. The peak is often inside backward's recovery and not at the end of forward
(BaGuaLu-2, section IV-A, adds transients to the stack at the same place).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flex_trainer.cost.evaluate import SegmentCost


@dataclass(frozen=True)
class Peak:
    """The highest point of a micro-batch, in bytes above what is in use before it."""

    num_bytes: int
    held_bytes: int
    """Held at the end of forward."""
    on_top_bytes: int
    """The part of it that is transient: recovered values, activation gradients, workspace."""


@dataclass(frozen=True)
class GradientBytes:
    """Parameter gradients per layer (key -1: outside of the layers), at the start of a micro-batch."""

    pending: dict[int, int] = field(default_factory=dict)
    """Bytes that backward will allocate and leave: gradients that do not exist yet."""
    temporary: dict[int, int] = field(default_factory=dict)
    """Bytes of the largest gradient that is computed apart and added to one that exists."""

    @property
    def key(self) -> tuple[int, int]:
        return sum(self.pending.values()), sum(self.temporary.values())


class Timeline:
    """Costs per segment in forward order (the layers, then the outside), with the peak kept up to date."""

    def __init__(
        self,
        costs: Sequence[SegmentCost],
        layers: Sequence[int],
        gradients: GradientBytes | None = None,
        shared_bytes: Sequence[int] = (),
        transient_factor: float = 1.0,
        in_flight_bytes: int = 0,
    ) -> None:
        """
        Args:
            costs: one per segment.
            layers: the layer of each segment, -1 for the outside (last).
            gradients: parameter gradients.
            shared_bytes: see `ActivationGraph`.
            transient_factor: what transients really are, over what the costs say.
            in_flight_bytes: most that offload copies may hold while they are on their way.
        """
        self._factor = transient_factor
        self._in_flight_bytes = in_flight_bytes
        self._offloaded = np.array([cost.offloaded_bytes for cost in costs], dtype=np.int64)
        gradients = gradients or GradientBytes()
        self._costs = list(costs)
        self._shared_bytes = np.array(shared_bytes, dtype=np.int64)
        self._shared_users = np.zeros(len(shared_bytes), dtype=np.int64)
        for cost in costs:
            self._shared_users[list(cost.shared)] += 1
        self._held = np.array([cost.held_bytes for cost in costs], dtype=np.int64)
        self._on_top = np.array([max(cost.backward_bytes, cost.forward_bytes) for cost in costs], dtype=np.int64)
        # Backward runs from the last layer down: while it is in layer l, the gradients of l and above are there
        # already.
        pending = np.array([gradients.pending.get(layer, 0) for layer in layers], dtype=np.int64)
        temporary = np.array([gradients.temporary.get(layer, 0) for layer in layers], dtype=np.int64)
        self._gradients = np.cumsum(pending[::-1])[::-1] + temporary

    def replace(self, segment: int, cost: SegmentCost) -> None:
        self._held[segment] = cost.held_bytes
        self._offloaded[segment] = cost.offloaded_bytes
        self._on_top[segment] = max(cost.backward_bytes, cost.forward_bytes)
        self._shared_users[list(self._costs[segment].shared)] -= 1
        self._shared_users[list(cost.shared)] += 1
        self._costs[segment] = cost

    def _shared(self) -> int:
        """Bytes of the values outside of the layers that some layer's replay needs."""
        return int(self._shared_bytes[self._shared_users > 0].sum())

    def peak(self) -> Peak:
        on_top = self._on_top * self._factor
        # While backward is in one layer, values of the layers below are on their way up, as many as are allowed.
        in_flight = np.minimum(self._offloaded.cumsum(), self._in_flight_bytes)
        heights = self.stacked() + on_top + self._gradients + in_flight
        segment = int(heights.argmax())
        held_bytes = int(self._held.sum()) + self._shared()
        return Peak(int(heights[segment]), held_bytes, int(on_top[segment]))

    def stacked(self) -> np.ndarray:
        """Bytes held once each segment has run forward."""
        # What lies outside of the layers (embedding, masks, head) is alive from the start: it comes last in the list
        # and first in memory.
        stacked = np.cumsum(self._held)
        stacked[:-1] += self._held[-1]
        return stacked + self._shared()
