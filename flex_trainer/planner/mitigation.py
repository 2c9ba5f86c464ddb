"""Algorithm 2 of BaGuaLu-2 (section V-A): mitigate operators until the micro-batch fits.

While the predicted peak is over the budget, take the best mitigation left that lowers it, apply it, and look again,
since one choice changes what others free. "Best" is most bytes per second of added time (the mitigation bandwidth of
the paper's roofline), or, as in the paper's own listing, simply most bytes. At the end, mitigations that later ones
made unnecessary are taken back.

The paper's conflict check (one tensor in two precisions or places) has its counterpart in the cost rules: a value has
one owner and one strategy, and a mitigation that frees nothing because somebody else holds the same storage has no
gain here.

One step at a time does not always get there: a first step may free nothing until a second one is taken. Where it does
not, the plans that mitigate everything are tried, so that a micro-batch is never called too large when one of those
would fit.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flex_trainer.cost.evaluate import SegmentCost, evaluate
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Strategy

_EPSILON_SECONDS = 1e-7


@dataclass(frozen=True)
class _Candidate:
    """One mitigation of one operator of one segment."""

    segment: int
    operator: int
    strategy: Strategy


_State = tuple[Timeline, list[dict[int, Strategy]], list[_Candidate]]
"""A timeline, the strategies it stands for (by segment and operator index), and the candidates applied to get there."""


class MitigationPlanner:
    """Plans one graph; segments of the same shape share their evaluations."""

    def __init__(
        self,
        graph: ActivationGraph,
        allowed: Iterable[Strategy],
        rates: Rates,
        *,
        largest_first: bool = False,
        transient_factor: float = 1.0,
    ) -> None:
        self._segments = graph.segments
        self._shared_bytes = graph.shared_bytes
        self._allowed = tuple(allowed)
        self._rates = rates
        self._largest_first = largest_first
        self._transient_factor = transient_factor
        classes: dict[object, int] = {}
        self._class_of = [classes.setdefault(segment.shape_key, index) for index, segment in enumerate(self._segments)]
        self._memo: dict[tuple[int, frozenset[tuple[int, Strategy]]], SegmentCost] = {}

    def plan(
        self,
        available_bytes: int,
        gradients: GradientBytes | None = None,
        fixed: Mapping[str, Strategy] | None = None,
    ) -> Plan:
        """The cheapest plan found whose peak is at most `available_bytes`; the least demanding one if none is.

        Args:
            available_bytes: what the limit leaves above what is in use.
            gradients: parameter gradients that backward will allocate.
            fixed: sites that have run already, with the strategy they ran under.
        """
        fixed = fixed or {}
        chosen: list[dict[int, Strategy]] = [
            {
                index: fixed[op.site.name]
                for index, op in enumerate(segment.operators)
                if fixed.get(op.site.name, Strategy.KEEP) is not Strategy.KEEP
            }
            for segment in self._segments
        ]
        kept = self._timeline(chosen, gradients).peak()
        if kept.num_bytes <= available_bytes or not self._allowed:
            return self._plan(chosen, available_bytes, gradients)
        # What is on its way up in backward fills up to the copies' bound again, so the first bytes that are offloaded
        # free nothing, and single steps would never start. Hence one plan without offload, and one with that bound
        # set aside.
        without = tuple(strategy for strategy in self._allowed if strategy is not Strategy.OFFLOAD)
        set_aside_bytes = min(self._rates.in_flight_bytes, kept.held_bytes)
        trials = [(without, available_bytes)] if without else []
        if Strategy.OFFLOAD in self._allowed:
            trials.append((self._allowed, available_bytes - set_aside_bytes))
        plans = [
            self._plan(self._choose(chosen, allowed, room_bytes, gradients, fixed), available_bytes, gradients)
            for allowed, room_bytes in trials
        ]
        return min(plans, key=lambda plan: (not plan.fits, plan.added_seconds if plan.fits else plan.peak_bytes))

    def _choose(
        self,
        start: list[dict[int, Strategy]],
        allowed: tuple[Strategy, ...],
        room_bytes: int,
        gradients: GradientBytes | None,
        fixed: Mapping[str, Strategy],
    ) -> list[dict[int, Strategy]]:
        """Strategies by segment and operator index that bring the peak, copies on their way left out, to
        `room_bytes`."""
        chosen = [dict(choice) for choice in start]
        timeline = self._timeline(chosen, gradients, in_flight_bytes=0)
        candidates = list(self._candidates(allowed, fixed))
        applied = self._mitigate(timeline, chosen, room_bytes, candidates)
        if timeline.peak().num_bytes > room_bytes:
            best = timeline, chosen, applied
            timeline, chosen, applied = self._everything(best, start, allowed, candidates, gradients)
        self._take_back(timeline, chosen, applied, room_bytes)
        return chosen

    def uniform(self, everywhere: Strategy, gradients: GradientBytes | None = None) -> Plan:
        """What one strategy for everything costs: the plan of a micro-batch that is run to measure."""
        chosen = [
            {index: everywhere for index, op in enumerate(segment.operators) if op.site.allows(everywhere)}
            if everywhere is not Strategy.KEEP
            else {}
            for segment in self._segments
        ]
        return self._plan(chosen, self._timeline(chosen, gradients).peak().num_bytes, gradients)

    def _timeline(
        self, chosen: list[dict[int, Strategy]], gradients: GradientBytes | None, in_flight_bytes: int | None = None
    ) -> Timeline:
        costs = [self._cost(index, choice) for index, choice in enumerate(chosen)]
        layers = [segment.layer for segment in self._segments]
        in_flight_bytes = self._rates.in_flight_bytes if in_flight_bytes is None else in_flight_bytes
        return Timeline(costs, layers, gradients, self._shared_bytes, self._transient_factor, in_flight_bytes)

    def _everything(
        self,
        best: _State,
        start: list[dict[int, Strategy]],
        allowed: tuple[Strategy, ...],
        candidates: list[_Candidate],
        gradients: GradientBytes | None,
    ) -> _State:
        """The lowest peak among `best` and the plans that mitigate all that has not run yet: each strategy alone, and
        each with another one for what it cannot be applied to."""
        for order in ((first, second) for first in allowed for second in allowed):
            chosen = [dict(choice) for choice in start]
            applied = []
            for candidate in candidates:
                site = self._segments[candidate.segment].operators[candidate.operator].site
                if candidate.strategy is next((strategy for strategy in order if site.allows(strategy)), None):
                    chosen[candidate.segment][candidate.operator] = candidate.strategy
                    applied.append(candidate)
            timeline = self._timeline(chosen, gradients, in_flight_bytes=0)
            if timeline.peak().num_bytes < best[0].peak().num_bytes:
                best = timeline, chosen, applied
        return best

    @functools.cached_property
    def _minimum_bytes(self) -> int:
        """M0: the least that one strategy for everything, segment by segment, holds at the end of forward."""
        least = {
            number: min(
                self._cost(
                    number, {i: s for i, op in enumerate(self._segments[number].operators) if op.site.allows(s)}
                ).held_bytes
                for s in (*self._allowed, Strategy.KEEP)
            )
            for number in set(self._class_of)
        }
        return sum(least[number] for number in self._class_of)

    def _mitigate(
        self,
        timeline: Timeline,
        chosen: list[dict[int, Strategy]],
        available_bytes: int,
        candidates: Iterable[_Candidate],
    ) -> list[_Candidate]:
        peak = timeline.peak().num_bytes
        applied: list[_Candidate] = []
        if peak <= available_bytes:
            return applied
        heap: list[tuple[float, int, int, _Candidate]] = []
        for number, candidate in enumerate(candidates):
            score = self._score(candidate, chosen)
            if score > 0:
                heapq.heappush(heap, (-score, candidate.segment, number, candidate))
        postponed: list[tuple[float, int, int, _Candidate]] = []
        while peak > available_bytes and heap:
            score, segment, number, candidate = heapq.heappop(heap)
            current = self._score(candidate, chosen)
            if current <= 0:
                continue
            if heap and current < -heap[0][0] * (1 - 1e-9):  # others changed its worth: queue it again
                heapq.heappush(heap, (-current, segment, number, candidate))
                continue
            choice = {**chosen[segment], candidate.operator: candidate.strategy}
            timeline.replace(segment, self._cost(segment, choice))
            new_peak = timeline.peak().num_bytes
            if new_peak >= peak:  # frees bytes, but not where the peak is
                timeline.replace(segment, self._cost(segment, chosen[segment]))
                postponed.append((-current, segment, number, candidate))
                continue
            chosen[segment], peak = choice, new_peak
            applied.append(candidate)
            for item in postponed:  # the peak has moved
                heapq.heappush(heap, item)
            postponed.clear()
        return applied

    def _take_back(
        self,
        timeline: Timeline,
        chosen: list[dict[int, Strategy]],
        applied: list[_Candidate],
        available_bytes: int,
    ) -> None:
        """Undo what later choices made unnecessary, the most expensive first."""
        if timeline.peak().num_bytes > available_bytes:
            return
        for candidate in sorted(applied, key=lambda c: -self._saving(c, chosen)):
            segment = candidate.segment
            choice = dict(chosen[segment])
            if choice.pop(candidate.operator, None) is not candidate.strategy:
                continue
            cost = self._cost(segment, choice)
            if cost.added_seconds >= self._cost(segment, chosen[segment]).added_seconds:
                continue
            timeline.replace(segment, cost)
            if timeline.peak().num_bytes <= available_bytes:
                chosen[segment] = choice
            else:
                timeline.replace(segment, self._cost(segment, chosen[segment]))

    def _saving(self, candidate: _Candidate, chosen: list[dict[int, Strategy]]) -> float:
        """Seconds that undoing the candidate would save."""
        choice = dict(chosen[candidate.segment])
        choice.pop(candidate.operator, None)
        now = self._cost(candidate.segment, chosen[candidate.segment])
        return now.added_seconds - self._cost(candidate.segment, choice).added_seconds

    def _candidates(self, allowed: tuple[Strategy, ...], fixed: Mapping[str, Strategy]) -> Iterable[_Candidate]:
        for number, segment in enumerate(self._segments):
            for index, operator in enumerate(segment.operators):
                if operator.site.name in fixed:
                    continue
                for strategy in allowed:
                    if operator.site.allows(strategy):
                        yield _Candidate(number, index, strategy)

    def _score(self, candidate: _Candidate, chosen: list[dict[int, Strategy]]) -> float:
        """Bytes freed, per second of added time unless largest goes first. Not positive: nothing gained."""
        choice = chosen[candidate.segment]
        if choice.get(candidate.operator) is Strategy.RECOMPUTE or candidate.strategy is choice.get(candidate.operator):
            return 0.0
        before = self._cost(candidate.segment, choice)
        after = self._cost(candidate.segment, {**choice, candidate.operator: candidate.strategy})
        freed = before.held_bytes - after.held_bytes
        if freed <= 0 or self._largest_first:
            return float(freed)
        return freed / max(after.added_seconds - before.added_seconds, _EPSILON_SECONDS)

    def _cost(self, segment: int, choice: Mapping[int, Strategy]) -> SegmentCost:
        key = (self._class_of[segment], frozenset(choice.items()))
        cost = self._memo.get(key)
        if cost is None:
            cost = self._memo[key] = evaluate(self._segments[self._class_of[segment]], choice, self._rates)
        return cost

    def _plan(
        self,
        chosen: list[dict[int, Strategy]],
        available_bytes: int,
        gradients: GradientBytes | None,
    ) -> Plan:
        timeline = self._timeline(chosen, gradients)
        peak = timeline.peak()
        kept_peak = self._timeline([{} for _ in chosen], gradients).peak()
        return Plan(
            strategies={
                self._segments[index].operators[operator].site.name: strategy
                for index, choice in enumerate(chosen)
                for operator, strategy in choice.items()
            },
            predicted_bytes=peak.held_bytes,
            peak_bytes=peak.num_bytes,
            on_top_bytes=peak.on_top_bytes,
            demand_bytes=kept_peak.held_bytes,
            demand_peak_bytes=kept_peak.num_bytes,
            added_seconds=sum(self._cost(index, choice).added_seconds for index, choice in enumerate(chosen)),
            minimum_bytes=self._minimum_bytes,
            held_by_layer=tuple(timeline.stacked().tolist()),
            fits=peak.num_bytes <= available_bytes,
        )
