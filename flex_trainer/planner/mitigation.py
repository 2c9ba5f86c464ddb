"""Algorithm 2 of BaGuaLu-2 (section V-A): mitigate operators until the micro-batch fits.

While the predicted peak is over the budget, take the best mitigation left that lowers it, apply it, and look again, since
one choice changes what others free. "Best" is most bytes per second of added time (the mitigation bandwidth of the paper's
roofline), or, as in the paper's own listing, simply most bytes. At the end, mitigations that later ones made unnecessary
are taken back.

The paper's conflict check (one tensor in two precisions or places) has its counterpart in the cost rules: a value has one
owner and one strategy, and a mitigation that frees nothing because somebody else holds the same storage has no gain here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flex_trainer.cost.evaluate import SegmentCost, evaluate
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Site, Strategy

_EPSILON_SECONDS = 1e-7


@dataclass(frozen=True)
class _Candidate:
    """One mitigation of one operator of one segment."""

    segment: int
    operator: int
    strategy: Strategy


class MitigationPlanner:
    """Plans one graph; segments of the same shape share their evaluations."""

    def __init__(
        self, graph: ActivationGraph, allowed: Iterable[Strategy], rates: Rates, *, largest_first: bool = False
    ) -> None:
        self._segments = graph.segments
        self._allowed = tuple(allowed)
        self._rates = rates
        self._largest_first = largest_first
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
        timeline = self._timeline(chosen, gradients)
        applied = self._mitigate(timeline, chosen, available_bytes, fixed)
        self._take_back(timeline, chosen, applied, available_bytes)
        return self._plan(chosen, timeline, available_bytes, gradients)

    def _timeline(self, chosen: list[dict[int, Strategy]], gradients: GradientBytes | None) -> Timeline:
        costs = [self._cost(index, choice) for index, choice in enumerate(chosen)]
        return Timeline(costs, [segment.layer for segment in self._segments], gradients)

    def _minimum_bytes(self) -> int:
        """M0: the least that can be held at the end of forward."""
        return sum(
            min(
                self._cost(number, {i: s for i, op in enumerate(segment.operators) if _may(s, op.site)}).held_bytes
                for s in (*self._allowed, Strategy.KEEP)
            )
            for number, segment in enumerate(self._segments)
        )

    def _mitigate(
        self, timeline: Timeline, chosen: list[dict[int, Strategy]], available_bytes: int, fixed: Mapping[str, Strategy]
    ) -> list[_Candidate]:
        peak = timeline.peak().num_bytes
        applied: list[_Candidate] = []
        if peak <= available_bytes:
            return applied
        heap: list[tuple[float, int, int, _Candidate]] = []
        for number, candidate in enumerate(self._candidates(fixed)):
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

    def _candidates(self, fixed: Mapping[str, Strategy]) -> Iterable[_Candidate]:
        for number, segment in enumerate(self._segments):
            for index, operator in enumerate(segment.operators):
                if operator.site.name in fixed:
                    continue
                for strategy in self._allowed:
                    if _may(strategy, operator.site):
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
        timeline: Timeline,
        available_bytes: int,
        gradients: GradientBytes | None,
    ) -> Plan:
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
            demand_bytes=kept_peak.held_bytes,
            demand_peak_bytes=kept_peak.num_bytes,
            added_seconds=sum(self._cost(index, choice).added_seconds for index, choice in enumerate(chosen)),
            minimum_bytes=self._minimum_bytes(),
            held_by_layer=tuple(timeline.stacked().tolist()),
            fits=peak.num_bytes <= available_bytes,
        )


def _may(strategy: Strategy, site: Site) -> bool:
    """Whether a site may have a strategy: routing is never made again, and logits never lose precision."""
    if strategy is Strategy.RECOMPUTE:
        return site.is_replayable
    return strategy is not Strategy.QUANTIZE or site.kind not in ("router", "loss", "lm_head")
