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

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.classes import Choice, GraphCosts
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


class GreedyMethod:
    """Algorithm 2 on one graph."""

    def __init__(self, costs: GraphCosts, allowed: tuple[Strategy, ...], largest_first: bool) -> None:
        self._costs = costs
        self._segments = costs.segments
        self._cost = costs.cost
        self._timeline = costs.timeline
        self._allowed = allowed
        self._largest_first = largest_first

    def choose(
        self,
        start: Sequence[Choice],
        available_bytes: int,
        gradients: GradientBytes | None,
        fixed: Mapping[str, Strategy],
    ) -> list[list[dict[int, Strategy]]]:
        """Plans to pick from: strategies by segment and operator index, above those at `start`."""
        # What is on its way up in backward fills up to the copies' bound again, so the first bytes that are offloaded
        # free nothing, and single steps would never start. Hence one plan without offload, and one with that bound
        # set aside.
        without = tuple(strategy for strategy in self._allowed if strategy is not Strategy.OFFLOAD)
        trials = [(without, available_bytes)] if without else []
        if Strategy.OFFLOAD in self._allowed:
            kept_bytes = self._timeline(start, gradients).peak().held_bytes
            set_aside_bytes = min(self._costs.rates.in_flight_bytes, kept_bytes)
            trials.append((self._allowed, available_bytes - set_aside_bytes))
        return [self._choose(start, allowed, room_bytes, gradients, fixed) for allowed, room_bytes in trials]

    def _choose(
        self,
        start: Sequence[Choice],
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

    def _everything(
        self,
        best: _State,
        start: Sequence[Choice],
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
