"""Costs of choices in one graph, each computed once for all segments of a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flex_trainer.cost.arrays import Costs
from flex_trainer.cost.compiled import CODE_OF, CompiledSegment, Passed
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.segment_cost import SegmentCost
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.choice import Choice, changed, codes_of
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
        self.segments = graph.repeated
        self.shared_bytes = graph.shared_bytes
        self.rates = rates
        self.classes, self.class_of = self.segments.classes, self.segments.class_of
        self.names = self.segments.positions.names
        self.compiled = [CompiledSegment(segment, rates) for segment in self.classes]
        # How transients turn out changes which plans fit, not which choices are worth having.
        self._question = self._allowed, replace(rates, transient_factor=1.0, in_flight_bytes=0)
        self._gradients: dict[object, np.ndarray] = {}
        self._known: dict[tuple[int, Choice], SegmentCost] = {}
        self._rows: dict[tuple[int, Choice], tuple[Costs, int]] = {}  # computed, and not asked for yet
        self._changes: dict[tuple[int, Choice], Changes] = {}

        # What keeping everything and each strategy everywhere cost is always asked.
        self.least_held = [
            int(self._evaluate_and_remember(number, self.uniform(number)).held.min())
            for number in range(len(self.classes))
        ]
        """By class: the least that one strategy for everything holds."""

    def uniform(self, number: int) -> list[Choice]:
        """Of a class: keep for everything, then each strategy wherever it may be."""
        structure = self.compiled[number].structure
        return [structure.uniform(CODE_OF[strategy]) for strategy in self._allowed]

    def cost(self, segment: int, choice: Choice) -> SegmentCost:
        """Cost of one segment."""
        return self._cost((self.class_of[segment], choice))

    def _cost(self, key: tuple[int, Choice]) -> SegmentCost:
        cost = self._known.get(key)
        if cost is None:
            if key not in self._rows:
                self._evaluate_and_remember(key[0], [key[1]])
            costs, row = self._rows.pop(key)
            cost = self._known[key] = costs.one(row)
        return cost

    def changes(self, number: int, choice: Choice) -> Changes:
        """What each single change of a choice, to keep or another allowed strategy, frees and adds in a segment of a
        class."""
        found = self._changes.get((number, choice))
        if found is None:
            allows = self.compiled[number].structure.allows
            codes = [CODE_OF[strategy] for strategy in self._allowed]
            of = [(operator, code) for operator in range(len(choice)) for code in codes if allows[operator, code]]
            choices = [choice, *(changed(choice, operator, code) for operator, code in of)]
            costs = self._evaluate_and_remember(number, choices)
            found = Changes(of, costs.held[0] - costs.held[1:], costs.seconds[1:] - costs.seconds[0])
            self._changes[number, choice] = found
        return found

    def transient_bytes(self, segment: int, choice: Choice) -> int:
        """The estimated part of what comes on top of one segment."""
        return int(self.compiled[self.class_of[segment]].transient_bytes(codes_of([choice]))[0])

    def freeing(self, code: int) -> tuple[float, float]:
        """Of one strategy alone: most bytes that it can free, and the fewest seconds for a byte."""
        most = [compiled.freeing(code) for compiled in self.compiled]
        most_bytes = sum(most[number][0] for number in self.class_of)
        return most_bytes, min((seconds for _, seconds in most), default=0.0)

    def fill_pools(self, plans: Sequence[Sequence[Choice]], room_share: float) -> None:
        """Leave the choices that the search for plans passed through, and those of the plans, to later graphs."""
        pools = [self.passed(number) for number in range(len(self.classes))]
        for pool in pools:
            pool.least_room_share = min(pool.least_room_share, room_share)
        passed: dict[tuple[int, Choice], None] = dict.fromkeys(self._changes)
        for plan in plans:
            passed.update(dict.fromkeys(zip(self.class_of, plan, strict=True)))
        for number, choice in passed:
            pools[number].add(choice)

    def passed(self, number: int) -> Passed:
        """The pool of a class."""
        return self.compiled[number].structure.passed(self._question)

    def remember(self, number: int, choice: Choice, cost: SegmentCost) -> None:
        """A cost of a class that was computed elsewhere."""
        self._known[number, choice] = cost

    def _evaluate_and_remember(self, number: int, choices: Sequence[Choice]) -> Costs:
        costs = self.compiled[number].evaluate(codes_of(choices))
        for row, choice in enumerate(choices):
            self._rows[number, choice] = costs, row
        return costs

    def timeline(
        self, chosen: Sequence[Choice], gradients: GradientBytes | None, in_flight_bytes: int | None = None
    ) -> Timeline:
        """The timeline of a choice for every segment; the rates say what copies in flight hold, unless given."""
        return Timeline(
            self._costs(chosen),
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
        return sum(cost.added_seconds for cost in self._costs(chosen))

    def recompute_seconds(self, chosen: Sequence[Choice]) -> float:
        """The part of it that recomputation takes."""
        return sum(cost.recompute_seconds for cost in self._costs(chosen))

    def _costs(self, chosen: Sequence[Choice]) -> list[SegmentCost]:
        """By segment."""
        keys = list(zip(self.class_of, chosen, strict=True))
        costs = {key: self._cost(key) for key in set(keys)}
        return [costs[key] for key in keys]
