"""Segments of equal shape: planned as one class, with the mean of their measured times.

Layers of the same shape do the same work, so where their measured times differ that is noise. With each layer's own
times a plan would pick the layers that happened to be measured fast, and promise more than it gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flex_trainer.cost.compiled import CODES, KEEP, CompiledSegment, Costs
from flex_trainer.cost.evaluate import SegmentCost, evaluate
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.strategy import Strategy

Choice = bytes
"""Strategies of one segment, as a number into `CODES` for each operator."""


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


@dataclass(frozen=True)
class Changes:
    """Single changes of one choice."""

    of: list[tuple[int, int]]
    """Operator and its new code."""
    freed_bytes: np.ndarray
    added_seconds: np.ndarray


class GraphCosts:
    """Costs of choices in one graph, each computed once for all segments of a class."""

    def __init__(self, graph: ActivationGraph, rates: Rates) -> None:
        self.segments = graph.segments
        self.shared_bytes = graph.shared_bytes
        self.rates = rates
        self.classes = classes_of(graph.segments)
        self.compiled = [CompiledSegment(segment, rates) for segment in self.classes.segments]
        self._heights: dict[object, np.ndarray] = {}
        self._memo: dict[tuple[int, Choice], SegmentCost] = {}
        self._rows: dict[tuple[int, Choice], tuple[Costs, int]] = {}  # computed, and not asked for yet
        self._changes: dict[tuple[int, Choice, tuple[int, ...]], Changes] = {}

    def cost(self, segment: int, choice: Choice) -> SegmentCost:
        """Cost of one segment."""
        key = self.classes.of[segment], choice
        cost = self._memo.get(key)
        if cost is None:
            found = self._rows.get(key)
            if found is not None:
                cost = found[0].one(found[1])
            else:
                cost = evaluate(self.classes.segments[key[0]], strategies_of(choice), self.rates)
            self._memo[key] = cost
        return cost

    def changes(self, number: int, choice: Choice, codes: tuple[int, ...]) -> Changes:
        """What each single change of a choice, to one of some codes, frees and adds in a segment of a class."""
        found = self._changes.get((number, choice, codes))
        if found is None:
            allows = self.compiled[number].structure.allows
            of = [(operator, code) for operator in range(len(choice)) for code in codes if allows[operator, code]]
            choices = [choice, *(changed(choice, operator, code) for operator, code in of)]
            costs = self._evaluate(number, choices)
            found = Changes(of, costs.held[0] - costs.held[1:], costs.seconds[1:] - costs.seconds[0])
            self._changes[number, choice, codes] = found
        return found

    def transient_bytes(self, segment: int, choice: Choice) -> int:
        """The estimated part of what comes on top of one segment."""
        number = self.classes.of[segment]
        return evaluate(self.classes.segments[number], strategies_of(choice), self.rates).transient_bytes

    def remember(self, number: int, choice: Choice, cost: SegmentCost) -> None:
        """A cost of a class that was computed elsewhere."""
        self._memo[number, choice] = cost

    def remember_uniform(self, strategies: Sequence[Strategy]) -> None:
        """Compute what keeping everything and each strategy everywhere cost, all at once."""
        for number, segment in enumerate(self.classes.segments):
            self._evaluate(number, [uniform_choice(segment, strategy) for strategy in (Strategy.KEEP, *strategies)])

    def _evaluate(self, number: int, choices: Sequence[Choice]) -> Costs:
        codes = np.frombuffer(b"".join(choices), dtype=np.uint8).reshape(len(choices), -1)
        costs = self.compiled[number].evaluate(codes.astype(np.int64))
        for row, choice in enumerate(choices):
            self._rows[number, choice] = costs, row
        return costs

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
            self.heights(gradients),
        )

    def heights(self, gradients: GradientBytes | None) -> np.ndarray:
        """See `GradientBytes.heights`; not to be changed."""
        gradients = gradients or GradientBytes()
        found = self._heights.get(gradients.exact_key)
        if found is None:
            found = self._heights[gradients.exact_key] = gradients.heights(self.segments)
        return found

    def added_seconds(self, chosen: Sequence[Choice]) -> float:
        """Time that a choice for every segment adds to the step."""
        return sum(self.cost(index, choice).added_seconds for index, choice in enumerate(chosen))


def uniform_choice(segment: Segment, strategy: Strategy) -> Choice:
    """One strategy for all that allows it."""
    code = CODES.index(strategy)
    return bytes(code if operator.site.allows(strategy) else KEEP for operator in segment.operators)


def changed(choice: Choice, operator: int, code: int) -> Choice:
    """The choice with another code for one operator."""
    return choice[:operator] + bytes((code,)) + choice[operator + 1 :]


def strategies_of(choice: Choice) -> dict[int, Strategy]:
    """The mitigations of a choice, by operator index."""
    return {index: CODES[code] for index, code in enumerate(choice) if code != KEEP}
