"""The memory timeline of one micro-batch: where its peak is, and how high.

Forward stacks what the segments hold. Backward takes it down again, last segment first; while a segment is in backward,
recovered values and gradients come on top. The peak is often inside backward's recovery and not at the end of forward
(BaGuaLu-2, section IV-A, adds transients to the stack at the same place).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flex_trainer.cost.graph import ActivationGraph, RepeatedSegments, Segment, with_structure_of
from flex_trainer.cost.segment_cost import SegmentCost


@dataclass(frozen=True)
class Peak:
    """The highest point of a micro-batch, in bytes above what is in use before it."""

    num_bytes: int
    held_bytes: int
    """Held at the end of forward."""
    segment: int
    """Where it is: an index into the segments."""


@dataclass(frozen=True)
class GradientBytes:
    """Parameter gradients per layer (key -1: outside of the layers), at the start of a micro-batch."""

    pending: dict[int, int] = field(default_factory=dict)
    """Bytes that backward will allocate and leave: gradients that do not exist yet."""
    temporary: dict[int, int] = field(default_factory=dict)
    """Bytes of the largest gradient that is computed apart and added to one that exists."""

    @functools.cached_property
    def key(self) -> object:
        """Equal for the same gradients."""
        return frozenset(self.pending.items()), frozenset(self.temporary.items())

    def by_segment(self, segments: Sequence[Segment]) -> np.ndarray:
        """Bytes of them that are there while backward is in each of the segments, given in forward order, and that the
        operators' transients do not count."""
        # Backward runs from the outside (the head) to the last layer and down: while it is in layer l, the gradients of
        # the layers above are there already. Those of l itself come one by one, which is known for operators that were
        # traced (see `with_gradients`).
        if isinstance(segments, RepeatedSegments):
            layers, class_of, classes = segments.positions.layers, segments.class_of, segments.classes
        else:
            layers, class_of, classes = [one.layer for one in segments], range(len(segments)), segments
        pending = np.array([self.pending.get(layer, 0) for layer in layers], dtype=np.int64)
        if not any(segment.is_traced for segment in classes):
            temporary = np.array([self.temporary.get(layer, 0) for layer in layers], dtype=np.int64)
            return np.cumsum(pending[::-1])[::-1] + temporary
        # Of what lies outside, the head comes first and the embedding at the very end.
        left_bytes = np.array([segment.gradient_bytes for segment in classes], dtype=np.int64)
        traced = np.minimum(pending, left_bytes[list(class_of)])
        return np.cumsum(traced[::-1])[::-1] - traced

    def share(self, layer: int, gradient_bytes: int) -> float:
        """Of the gradients that a layer's operators leave, the share that does not exist yet."""
        return min(self.pending.get(layer, 0) / gradient_bytes, 1.0) if gradient_bytes else 0.0

    def shares(self, segments: RepeatedSegments) -> tuple[float, ...]:
        """The same by segment."""
        left_bytes = [segment.gradient_bytes for segment in segments.classes]
        where = zip(segments.positions.layers, segments.class_of, strict=True)
        return tuple(self.share(layer, left_bytes[number]) for layer, number in where)


def with_gradients(graph: ActivationGraph, gradients: GradientBytes | None) -> ActivationGraph:
    """The graph with the parameter gradients that backward leaves behind in its operators' transients: in the backward
    of one operator, those of all later ones of its segment are there."""
    if gradients is None:
        return graph
    shares = gradients.shares(graph.repeated)
    if not any(shares):
        return graph

    def added(segment: Segment, index: int) -> Segment:
        if not shares[index]:
            return segment
        on_top = gradients_on_top(segment, shares[index]).tolist()
        operators = (
            replace(operator, backward_transient_bytes=operator.backward_transient_bytes + num_bytes)
            if operator.backward_transient_bytes is not None and num_bytes
            else operator
            for operator, num_bytes in zip(segment.operators, on_top, strict=True)
        )
        return with_structure_of(segment, replace(segment, operators=tuple(operators)))

    return replace(graph, segments=graph.repeated.mapped(lambda index: shares[index], added))


def gradients_on_top(segment: Segment, share: float) -> np.ndarray:
    """Bytes by operator: of the gradients that later operators leave, what does not exist yet; only where the
    operator's own transient is known."""
    left_bytes = np.array([operator.gradient_bytes for operator in segment.operators], dtype=np.int64)
    later_bytes = np.cumsum(left_bytes[::-1])[::-1] - left_bytes
    is_known = np.array([operator.backward_transient_bytes is not None for operator in segment.operators], dtype=bool)
    return (np.rint(share * later_bytes) * (is_known & (share * later_bytes >= 1))).astype(np.int64)


class Timeline:
    """Costs per segment in forward order (the layers, then the outside), with the peak kept up to date."""

    def __init__(
        self,
        costs: Sequence[SegmentCost],
        segments: Sequence[Segment],
        gradients: GradientBytes | None = None,
        shared_bytes: Sequence[int] = (),
        in_flight_bytes: int = 0,
        gradients_by_segment: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            costs: one per segment.
            segments: what they are costs of; what lies outside of the layers comes last.
            gradients: parameter gradients.
            shared_bytes: see `ActivationGraph`.
            in_flight_bytes: most that offload copies may hold while they are on their way.
            gradients_by_segment: `gradients.by_segment(segments)`, where it is known already.
        """
        self._in_flight_bytes = in_flight_bytes
        self._costs = list(costs)
        # Most segments share their costs.
        distinct = {id(cost): cost for cost in costs}
        numbers = {key: number for number, key in enumerate(distinct)}
        where = np.array([numbers[id(cost)] for cost in costs], dtype=np.int64)
        sizes = np.array(
            [(cost.held_bytes, cost.on_top_bytes, cost.offloaded_bytes) for cost in distinct.values()], dtype=np.int64
        ).reshape(-1, 3)
        self._held, self._on_top, self._offloaded = sizes[where].T.copy()
        self._shared_bytes = np.array(shared_bytes, dtype=np.int64)
        self._shared_users = np.zeros(len(shared_bytes), dtype=np.int64)
        for cost, num_users in zip(
            distinct.values(), np.bincount(where, minlength=len(distinct)).tolist(), strict=True
        ):
            if cost.shared:
                self._shared_users[list(cost.shared)] += num_users
        gradients = gradients or GradientBytes()
        self.gradients = gradients.by_segment(segments) if gradients_by_segment is None else gradients_by_segment
        """Bytes of parameter gradients that are there while backward is in each segment."""
        self._pending_bytes = sum(gradients.pending.values())

    @classmethod
    def of_sizes(
        cls,
        held: np.ndarray,
        on_top: np.ndarray,
        offloaded: np.ndarray,
        shared_users: np.ndarray,
        segments: Sequence[Segment],
        gradients: GradientBytes,
        shared_bytes: Sequence[int],
        in_flight_bytes: int,
    ) -> Timeline:
        """From arrays over the segments, and the number of segments that need each shared value. It cannot be
        changed."""
        timeline = cls([], [], gradients, shared_bytes, in_flight_bytes, gradients.by_segment(segments))
        timeline._held, timeline._on_top, timeline._offloaded = held, on_top, offloaded
        timeline._shared_users = shared_users
        return timeline

    def copy(self) -> Timeline:
        """The same, to be changed apart."""
        other = copy.copy(self)
        other._costs = list(self._costs)
        for name in ("_held", "_on_top", "_offloaded", "_shared_users"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def replace(self, segments: Sequence[int], cost: SegmentCost) -> None:
        """Some segments that cost the same now."""
        index = list(segments)
        self._held[index] = cost.held_bytes
        self._offloaded[index] = cost.offloaded_bytes
        self._on_top[index] = cost.on_top_bytes
        for segment in index:
            if self._costs[segment].shared != cost.shared:
                self._shared_users[list(self._costs[segment].shared)] -= 1
                self._shared_users[list(cost.shared)] += 1
            self._costs[segment] = cost

    def peaks_with(self, segments: Sequence[int], cost: SegmentCost) -> np.ndarray:
        """The peak with `cost` in none, the first, the first two, ... all of some segments that cost the same now."""
        numbers = np.arange(len(segments) + 1)[:, None]
        rank = np.full(len(self._held), len(segments))
        rank[list(segments)] = np.arange(len(segments))
        is_new = rank < numbers
        users = np.repeat(self._shared_users[None], len(numbers), axis=0)
        users[:, list(self._costs[segments[0]].shared)] -= numbers
        users[:, list(cost.shared)] += numbers
        held = np.where(is_new, cost.held_bytes, self._held)
        offloaded = np.where(is_new, cost.offloaded_bytes, self._offloaded)
        on_top = np.where(is_new, cost.on_top_bytes, self._on_top)
        heights = self._heights(_stacked(held), offloaded, on_top, users) + self.gradients
        return np.maximum(heights.max(axis=1), self._pending_bytes + held[:, -1])

    def peak(self) -> Peak:
        """The highest point as things are."""
        heights = self.heights(self._on_top) + self.gradients
        segment = int(heights.argmax())
        return Peak(max(int(heights[segment]), self.end_bytes), self.held_bytes, segment)

    @property
    def held_bytes(self) -> int:
        """Bytes held at the end of forward."""
        return int(self._held.sum() + self._shared(self._shared_users))

    @property
    def end_bytes(self) -> int:
        """Bytes there when backward ends: all gradients, and what lies outside of the layers, just before it goes."""
        return self._pending_bytes + int(self._held[-1])

    def heights(self, on_top: np.ndarray) -> np.ndarray:
        """Bytes there while each segment runs and needs so much on top of the stack; gradients left out."""
        return self._heights(_stacked(self._held), self._offloaded, on_top, self._shared_users)

    def stacked(self) -> np.ndarray:
        """Bytes held once each segment has run forward."""
        return _stacked(self._held) + self._shared(self._shared_users)

    # On arrays whose last axis goes over the segments, or, for users, over the shared values

    def _heights(self, stacked: np.ndarray, offloaded: np.ndarray, on_top: np.ndarray, users: np.ndarray) -> np.ndarray:
        # While backward is in one layer, values of the layers below are on their way up, as many as are allowed.
        in_flight = np.minimum(offloaded.cumsum(axis=-1), self._in_flight_bytes)
        return stacked + self._shared(users)[..., None] + on_top + in_flight

    def _shared(self, users: np.ndarray) -> np.ndarray:
        """Bytes of the values outside of the layers that some layer's recompute needs."""
        return ((users > 0) * self._shared_bytes).sum(axis=-1)


def _stacked(held: np.ndarray) -> np.ndarray:
    # What lies outside of the layers (embedding, masks, head) is alive from the start: it comes last in the list and
    # first in memory.
    stacked = held.cumsum(axis=-1)
    stacked[..., :-1] += held[..., -1:]
    return stacked


def peaks_of(
    held: np.ndarray,
    on_top: np.ndarray,
    offloaded: np.ndarray,
    shared: np.ndarray,
    gradients: np.ndarray,
    pending_bytes: int,
    in_flight_bytes: int,
) -> np.ndarray:
    """Peaks of many plans at once.

    Args:
        held, on_top, offloaded: plans x segments, as in `SegmentCost`.
        shared: by plan: bytes of the values outside of the layers that it needs.
        gradients: by segment: those there while backward is in it.
        pending_bytes: of gradients, when backward ends.
        in_flight_bytes: most that offload copies may hold while they are on their way.
    """
    in_flight = np.minimum(offloaded.cumsum(axis=1), in_flight_bytes)
    heights = _stacked(held) + on_top + in_flight + gradients
    return np.maximum(heights.max(axis=1) + shared, pending_bytes + held[:, -1])
