"""Segments of equal shape: planned as one class, with the mean of their measured times.

Layers of the same shape do the same work, so where their measured times differ that is noise. With each layer's own
times a plan would pick the layers that happened to be measured fast, and promise more than it gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flex_trainer.cost.compiled import CODES, KEEP, CompiledSegment
from flex_trainer.cost.evaluate import SegmentCost, evaluate
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.strategy import Strategy

Choice = Mapping[int, Strategy]
"""Mitigations of one segment by operator index; absent: keep."""

_CODE_OF = {strategy: code for code, strategy in enumerate(CODES)}


@dataclass(frozen=True)
class Classes:
    """Which segments are equal, and one segment for each class."""

    of: tuple[int, ...]
    segments: tuple[Segment, ...]


def classes_of(segments: Sequence[Segment]) -> Classes:
    """Group segments that differ in nothing but names and times."""
    members: dict[object, list[Segment]] = {}
    keys = []
    for segment in segments:
        key = segment.shape_key
        members.setdefault(key, []).append(segment)
        keys.append(key)
    numbers = {key: number for number, key in enumerate(members)}
    return Classes(tuple(numbers[key] for key in keys), tuple(_mean(group) for group in members.values()))


def _mean(segments: list[Segment]) -> Segment:
    if len(segments) == 1:
        return segments[0]
    seconds = np.mean([[operator.seconds for operator in segment.operators] for segment in segments], axis=0)
    operators = zip(segments[0].operators, seconds.tolist(), strict=True)
    return replace(segments[0], operators=tuple(replace(operator, seconds=mean) for operator, mean in operators))


class GraphCosts:
    """Costs of choices in one graph, each computed once for all segments of a class."""

    def __init__(self, graph: ActivationGraph, rates: Rates) -> None:
        self.segments = graph.segments
        self.shared_bytes = graph.shared_bytes
        self.rates = rates
        self.classes = classes_of(graph.segments)
        self.compiled = [CompiledSegment(segment, rates) for segment in self.classes.segments]
        self._memo: dict[tuple[int, frozenset[tuple[int, Strategy]]], SegmentCost] = {}

    def cost(self, segment: int, choice: Choice) -> SegmentCost:
        """Cost of one segment."""
        number = self.classes.of[segment]
        key = (number, frozenset(choice.items()))
        cost = self._memo.get(key)
        if cost is None:
            cost = self._memo[key] = evaluate(self.classes.segments[number], choice, self.rates)
        return cost

    def transient_bytes(self, segment: int, choice: Choice) -> int:
        """The estimated part of what comes on top of one segment."""
        return evaluate(self.classes.segments[self.classes.of[segment]], choice, self.rates).transient_bytes

    def remember(self, number: int, choices: Sequence[Choice], costs: Sequence[SegmentCost]) -> None:
        """Costs of a class that were computed elsewhere."""
        for choice, cost in zip(choices, costs, strict=True):
            self._memo[number, frozenset(choice.items())] = cost

    def remember_uniform(self, strategies: Sequence[Strategy]) -> None:
        """Compute what keeping everything and each strategy everywhere cost, all at once."""
        for number, segment in enumerate(self.classes.segments):
            compiled = self.compiled[number]
            choices = [uniform_choice(segment, strategy) for strategy in (Strategy.KEEP, *strategies)]
            codes = [codes_of(segment, choice) for choice in choices]
            costs = compiled.evaluate(np.array(codes, dtype=np.int64).reshape(len(choices), len(segment.operators)))
            self.remember(number, choices, [costs.one(row) for row in range(len(choices))])

    def timeline(
        self, chosen: Sequence[Choice], gradients: GradientBytes | None, in_flight_bytes: int | None = None
    ) -> Timeline:
        """The timeline of a choice for every segment; the rates say what copies in flight hold, unless given."""
        return Timeline(
            [self.cost(index, choice) for index, choice in enumerate(chosen)],
            self.segments,
            gradients,
            self.shared_bytes,
            self.rates.in_flight_bytes if in_flight_bytes is None else in_flight_bytes,
        )

    def added_seconds(self, chosen: Sequence[Choice]) -> float:
        """Time that a choice for every segment adds to the step."""
        return sum(self.cost(index, choice).added_seconds for index, choice in enumerate(chosen))


def uniform_choice(segment: Segment, strategy: Strategy) -> dict[int, Strategy]:
    """One strategy for all that allows it."""
    if strategy is Strategy.KEEP:
        return {}
    return {index: strategy for index, op in enumerate(segment.operators) if op.site.allows(strategy)}


def codes_of(segment: Segment, choice: Choice) -> list[int]:
    """A choice as numbers into `CODES`, one for each operator."""
    return [_CODE_OF[choice[index]] if index in choice else KEEP for index in range(len(segment.operators))]
