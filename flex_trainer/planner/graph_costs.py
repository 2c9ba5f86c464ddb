"""Costs of choices in one graph, each computed once for all segments of a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.compiled import CODES, CompiledSegment, Costs
from flex_trainer.cost.evaluate import SegmentCost, evaluate
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.choice import Choice, changed, strategies_of, uniform_choice
from flex_trainer.planner.classes import classes_of
from flex_trainer.strategy import Strategy


@dataclass(frozen=True)
class Changes:
    """Single changes of one choice."""

    of: list[tuple[int, int]]
    """Operator and its new code."""
    freed_bytes: np.ndarray
    added_seconds: np.ndarray


class GraphCosts:
    """Costs of choices in one graph, under one machine's rates."""

    def __init__(self, graph: ActivationGraph, rates: Rates, allowed: Sequence[Strategy]) -> None:
        self._allowed = (Strategy.KEEP, *allowed)
        self.segments = graph.segments
        self.shared_bytes = graph.shared_bytes
        self.rates = rates
        self.classes = classes_of(graph.segments)
        self.compiled = [CompiledSegment(segment, rates) for segment in self.classes.segments]
        self._gradients: dict[object, np.ndarray] = {}
        self._memo: dict[tuple[int, Choice], SegmentCost] = {}
        self._rows: dict[tuple[int, Choice], tuple[Costs, int]] = {}  # computed, and not asked for yet
        self._changes: dict[tuple[int, Choice], Changes] = {}

        # What keeping everything and each strategy everywhere cost is always asked.
        for number, segment in enumerate(self.classes.segments):
            self._evaluate_and_remember(number, [uniform_choice(segment, strategy) for strategy in self._allowed])

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

    def changes(self, number: int, choice: Choice) -> Changes:
        """What each single change of a choice, to keep or another allowed strategy, frees and adds in a segment of a
        class."""
        found = self._changes.get((number, choice))
        if found is None:
            allows = self.compiled[number].structure.allows
            codes = [CODES.index(strategy) for strategy in self._allowed]
            of = [(operator, code) for operator in range(len(choice)) for code in codes if allows[operator, code]]
            choices = [choice, *(changed(choice, operator, code) for operator, code in of)]
            costs = self._evaluate_and_remember(number, choices)
            found = Changes(of, costs.held[0] - costs.held[1:], costs.seconds[1:] - costs.seconds[0])
            self._changes[number, choice] = found
        return found

    def transient_bytes(self, segment: int, choice: Choice) -> int:
        """The estimated part of what comes on top of one segment."""
        number = self.classes.of[segment]
        return evaluate(self.classes.segments[number], strategies_of(choice), self.rates).transient_bytes

    def remember(self, number: int, choice: Choice, cost: SegmentCost) -> None:
        """A cost of a class that was computed elsewhere."""
        self._memo[number, choice] = cost

    def _evaluate_and_remember(self, number: int, choices: Sequence[Choice]) -> Costs:
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
            self.gradients_by_segment(gradients),
        )

    def gradients_by_segment(self, gradients: GradientBytes | None) -> np.ndarray:
        """See `GradientBytes.by_segment`; not to be changed."""
        gradients = gradients or GradientBytes()
        found = self._gradients.get(gradients.key)
        if found is None:
            found = self._gradients[gradients.key] = gradients.by_segment(self.segments)
        return found

    def added_seconds(self, chosen: Sequence[Choice]) -> float:
        """Time that a choice for every segment adds to the step."""
        return sum(self.cost(index, choice).added_seconds for index, choice in enumerate(chosen))

    def recompute_seconds(self, chosen: Sequence[Choice]) -> float:
        """The part of it that recomputation takes."""
        return sum(self.cost(index, choice).recompute_seconds for index, choice in enumerate(chosen))
