"""The micro-batch level of the cost model: a graph under a choice of strategies, as the numbers a schedule needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.compiled import CODE_OF, KEEP, CompiledSegment
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.iteration import MicroBatchCost
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.segment_cost import SegmentCost, backward_transients
from flex_trainer.cost.timeline import GradientBytes, Timeline, with_gradients
from flex_trainer.strategy import Strategy


@dataclass(frozen=True)
class Profiled:
    """A micro-batch's memory and what mitigating adds to its time."""

    cost: MicroBatchCost
    """Without times."""
    segments: tuple[SegmentCost, ...]

    @property
    def added_seconds(self) -> float:
        """What the mitigations add to backward."""
        return sum(segment.added_seconds for segment in self.segments)


class MicroBatchModel:
    """Costs of one graph under many choices; segments that are alike share their evaluations.

    Args:
        graph: the micro-batch.
        rates: what mitigations cost.
        gradients: what backward adds per layer.
    """

    def __init__(self, graph: ActivationGraph, rates: Rates, gradients: GradientBytes) -> None:
        graph = with_gradients(graph, gradients)
        self._graph = graph
        self._rates = rates
        self._classes = [CompiledSegment(segment, rates) for segment in graph.repeated.classes]
        self._memo: dict[tuple[int, bytes], SegmentCost] = {}
        self._gradients = gradients

    def under(self, strategies: Mapping[str, Strategy]) -> Profiled:
        """Under strategies by site name (absent: keep)."""
        segments = self._graph.repeated
        where = zip(segments.class_of, segments.positions.names, strict=True)
        return self._profiled([self._cost(number, names, strategies) for number, names in where])

    def under_full_checkpointing(self, forward_seconds: Sequence[float]) -> Profiled:
        """Every decoder layer a checkpoint, as `gradient_checkpointing` makes it: its input is kept, and all of it runs
        again in backward, routing included. What lies outside of the layers is kept.

        Args:
            forward_seconds: of each segment, all that is in it and what it waits for other ranks.
        """
        segments = self._graph.repeated
        costs: dict[tuple[int, float], SegmentCost] = {}
        keys = list(zip(segments.class_of, forward_seconds, strict=True))
        for number, seconds in set(keys):
            costs[number, seconds] = self._checkpointed(number, segments.classes[number], seconds)
        return self._profiled([costs[key] for key in keys])

    def _checkpointed(self, number: int, segment: Segment, forward_seconds: float) -> SegmentCost:
        kept = self._cost(number, segment.names, {})
        whole = next((operator for operator in segment.operators if operator.site.kind == "layer"), None)
        if segment.layer < 0 or whole is None:
            return kept
        seconds = self._rates.recompute_overhead_seconds + self._rates.recompute_factor * forward_seconds
        return SegmentCost(
            held_bytes=whole.output_bytes,
            added_seconds=seconds,
            recompute_seconds=seconds,
            backward_bytes=kept.held_bytes - whole.output_bytes + kept.backward_bytes,
            forward_bytes=kept.forward_bytes,
            shared=frozenset(value for operator in segment.operators for value in operator.shared_inputs),
        )

    def _cost(self, number: int, names: tuple[str, ...], strategies: Mapping[str, Strategy]) -> SegmentCost:
        choice = bytes(CODE_OF[strategies[name]] if name in strategies else KEEP for name in names)
        cost = self._memo.get((number, choice))
        if cost is None:
            codes = np.frombuffer(choice, dtype=np.uint8).astype(np.int64)[None]
            cost = self._memo[number, choice] = self._classes[number].evaluate(codes).one(0)
        return cost

    def _profiled(self, costs: Sequence[SegmentCost]) -> Profiled:
        """The timeline's two halves apart, and where each is highest."""
        graph = self._graph
        timeline = Timeline(costs, graph.segments, self._gradients, graph.shared_bytes, self._rates.in_flight_bytes)
        forward = timeline.heights(np.array([cost.forward_bytes for cost in costs]))
        backward = timeline.heights(np.array([cost.backward_bytes for cost in costs])) + timeline.gradients
        highest_forward, highest_backward = int(forward.argmax()), int(backward.argmax())
        return Profiled(
            MicroBatchCost(
                held_bytes=timeline.held_bytes,
                forward_peak_bytes=int(forward[highest_forward]),
                backward_peak_bytes=max(int(backward[highest_backward]), timeline.end_bytes),
                forward_operator=_busiest(graph.segments[highest_forward], in_backward=False),
                backward_operator=_busiest(graph.segments[highest_backward], in_backward=True),
            ),
            tuple(costs),
        )


def _busiest(segment: Segment, in_backward: bool) -> str:
    """The operator of a segment that has most alive on top of what is held."""
    operators = segment.operators
    if not operators:
        return ""
    if not in_backward:
        return max(operators, key=lambda operator: operator.forward_transient_bytes or 0).site.name
    on_top = backward_transients(segment)
    return operators[max(range(len(operators)), key=lambda index: on_top[index] or 0)].site.name
