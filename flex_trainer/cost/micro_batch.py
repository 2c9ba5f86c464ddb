"""The micro-batch level of the cost model: a graph under a choice of strategies, as the numbers a schedule needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.evaluate import SegmentCost, backward_transients, evaluate
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.iteration import MicroBatchCost
from flex_trainer.cost.roofline import Rates
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
        numbers: dict[object, int] = {}
        self._kind_of = [numbers.setdefault(_key(segment), len(numbers)) for segment in graph.segments]
        self._memo: dict[tuple[int, tuple[tuple[int, Strategy], ...]], SegmentCost] = {}
        self._gradients = gradients

    def under(self, strategies: Mapping[str, Strategy]) -> Profiled:
        """Under strategies by site name (absent: keep)."""
        return self._profiled([self._cost(number, strategies) for number in range(len(self._graph.segments))])

    def under_full_checkpointing(self) -> Profiled:
        """Every decoder layer a checkpoint, as `gradient_checkpointing` makes it: its input is kept, and all of it runs
        again in backward, routing included. What lies outside of the layers is kept."""
        costs = []
        for number, segment in enumerate(self._graph.segments):
            kept = self._cost(number, {})
            whole = next((operator for operator in segment.operators if operator.site.kind == "layer"), None)
            if segment.layer < 0 or whole is None:
                costs.append(kept)
                continue
            costs.append(
                SegmentCost(
                    held_bytes=whole.output_bytes,
                    added_seconds=self._rates.replay_overhead_seconds + self._rates.recompute_factor * whole.seconds,
                    backward_bytes=kept.held_bytes - whole.output_bytes + kept.backward_bytes,
                    forward_bytes=kept.forward_bytes,
                    shared=frozenset(value for operator in segment.operators for value in operator.shared_inputs),
                )
            )
        return self._profiled(costs)

    def _cost(self, number: int, strategies: Mapping[str, Strategy]) -> SegmentCost:
        segment = self._graph.segments[number]
        choice = tuple(
            (index, strategies[operator.site.name])
            for index, operator in enumerate(segment.operators)
            if strategies.get(operator.site.name, Strategy.KEEP) is not Strategy.KEEP
        )
        key = (self._kind_of[number], choice)
        cost = self._memo.get(key)
        if cost is None:
            cost = self._memo[key] = evaluate(segment, dict(choice), self._rates)
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


def _key(segment: Segment) -> object:
    """Equal where `evaluate` gives the same for the same choice; times count here."""
    return segment.shape_key, tuple(operator.seconds for operator in segment.operators)


def _busiest(segment: Segment, in_backward: bool) -> str:
    """The operator of a segment that has most alive on top of what is held."""
    operators = segment.operators
    if not operators:
        return ""
    if not in_backward:
        return max(operators, key=lambda operator: operator.forward_transient_bytes or 0).site.name
    on_top = backward_transients(segment)
    return operators[max(range(len(operators)), key=lambda index: on_top[index] or 0)].site.name
