"""Algorithm 2 of BaGuaLu-2 (section V-A): mitigate operators until the micro-batch fits.

While the predicted peak is over the budget, take the best mitigation left that lowers it, apply it, and look again,
since one choice changes what others free. "Best" is most bytes per second of added time (the mitigation bandwidth of
the paper's roofline), or, as in the paper's own listing, simply most bytes. At the end, mitigations that later ones
made unnecessary are rolled back.

Equal layers have equal candidates, so a candidate is looked at once for all of them: it is applied to as many, from the
first layer on, as brings the peak under the budget, or else lowers it most.

The paper's conflict check (one tensor in two precisions or places) has its counterpart in the cost rules: a value has
one owner and one strategy, and a mitigation that frees nothing because something else holds the same storage has no
gain here.

One step at a time does not always get there: a first step may free nothing until a second one is taken. Where it does
not, the plans that mitigate everything are tried, so that a micro-batch is never called too large when one of those
would fit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flex_trainer.cost.compiled import CODE_OF, EPSILON_SECONDS, KEEP, RECOMPUTE
from flex_trainer.cost.timeline import GradientBytes, Timeline
from flex_trainer.planner.choice import Choice, changed
from flex_trainer.planner.graph_costs import GraphCosts
from flex_trainer.strategy import Strategy


class _Group(NamedTuple):
    """Segments that are alike, with what has been chosen for them."""

    number: int
    """Their class."""
    free: bytes
    """Marks of the operators that may still be chosen for."""
    choice: Choice


class _Candidate(NamedTuple):
    """One change of one operator, for all segments of a group; the best one sorts first."""

    rank: float
    """Lowest first."""
    first_segment: int
    operator: int
    code: int
    group: _Group


@dataclass(frozen=True)
class _Candidates:
    """What may be chosen, and how candidates are ranked."""

    costs: GraphCosts
    codes: tuple[int, ...]
    """Of the mitigations that may be used."""
    largest_first: bool

    def of(self, group: _Group, first_segment: int) -> list[_Candidate]:
        """All single changes of a group that free bytes."""
        changes = self.costs.changes(group.number, group.choice)
        scores = changes.freed_bytes
        if not self.largest_first:
            scores = scores / np.maximum(changes.added_seconds, EPSILON_SECONDS)
        return [
            _Candidate(-float(scores[row]), first_segment, operator, code, group)
            for row, (operator, code) in enumerate(changes.of)
            if scores[row] > 0
            and code in self.codes
            and group.free[operator]
            and group.choice[operator] not in (RECOMPUTE, code)
        ]


class _State:
    """A choice for every segment, equal ones together, with the timeline they make."""

    def __init__(self, costs: GraphCosts, members: dict[_Group, list[int]], timeline: Timeline) -> None:
        self._costs = costs
        self.members = members
        self.timeline = timeline

    @classmethod
    def of(cls, costs: GraphCosts, choices: Sequence[Choice], free: Sequence[bytes], timeline: Timeline) -> _State:
        """From a choice and the free operators by segment."""
        members: dict[_Group, list[int]] = {}
        for segment, (choice, marks) in enumerate(zip(choices, free, strict=True)):
            members.setdefault(_Group(costs.class_of[segment], marks, choice), []).append(segment)
        return cls(costs, members, timeline)

    def copy(self) -> _State:
        """The same, to be changed apart."""
        return _State(self._costs, dict(self.members), self.timeline.copy())

    def peaks(self, group: _Group, operator: int, code: int) -> np.ndarray:
        """Peak with one operator changed in none, the first, the first two, ... all of a group's segments."""
        members = self.members[group]
        cost = self._costs.cost(members[0], changed(group.choice, operator, code))
        return self.timeline.peaks_with(members, cost)

    def change(self, group: _Group, operator: int, code: int, number: int) -> _Group:
        """Change one operator in the first segments of a group; returns the group that they are in now."""
        members = self.members.pop(group)
        moved, left = members[:number], members[number:]
        if left:
            self.members[group] = left
        other = group._replace(choice=changed(group.choice, operator, code))
        self.timeline.replace(moved, self._costs.cost(moved[0], other.choice))
        self.members[other] = sorted([*self.members.get(other, ()), *moved])
        return other

    def choices(self) -> list[Choice]:
        """By segment."""
        pairs = [(segment, group.choice) for group, members in self.members.items() for segment in members]
        return [choice for _, choice in sorted(pairs)]


class _Step(NamedTuple):
    """One candidate applied."""

    group: _Group
    operator: int
    code: int
    peaks: np.ndarray
    """With it in none, the first, the first two, ... of the group's segments."""


class _Descent:
    """The steps of the algorithm from one start. A budget says where to stop, not which step comes next, so they are
    worked out once, as far as any budget has asked for."""

    def __init__(self, state: _State, candidates: _Candidates) -> None:
        self._start = state.copy()
        self._state = state
        self._candidates = candidates
        self._steps: list[_Step] = []
        self._heap: list[_Candidate] = []
        self._queued: set[tuple[_Group, int, int]] = set()
        for group in list(state.members):
            self._push(group)

    def to(self, available_bytes: int) -> _State:
        """As far down as the peak fits, or as no candidate lowers it."""
        state = self._start.copy()
        if state.timeline.peak().num_bytes <= available_bytes:
            return state
        number = 0
        while number < len(self._steps) or self._advance():
            step = self._steps[number]
            enough = np.flatnonzero(step.peaks <= available_bytes)
            state.change(step.group, step.operator, step.code, int(enough[0]) if len(enough) else _lowest(step.peaks))
            if len(enough):
                break
            number += 1
        return state

    def _advance(self) -> bool:
        """One step more, if there is any."""
        postponed: list[_Candidate] = []
        while self._heap:
            candidate = heapq.heappop(self._heap)
            group, operator, code = candidate.group, candidate.operator, candidate.code
            if group not in self._state.members:
                self._queued.discard((group, operator, code))
                continue
            peaks = self._state.peaks(group, operator, code)
            number = _lowest(peaks)
            if number == 0:  # frees bytes, but not where the peak is
                postponed.append(candidate)
                continue
            self._steps.append(_Step(group, operator, code, peaks))
            other = self._state.change(group, operator, code, number)
            if group in self._state.members:
                postponed.append(candidate)
            else:
                self._queued.discard((group, operator, code))
            self._push(other)
            for one in postponed:  # the peak has moved
                heapq.heappush(self._heap, one)
            return True
        return False

    def _push(self, group: _Group) -> None:
        for candidate in self._candidates.of(group, self._state.members[group][0]):
            key = (group, candidate.operator, candidate.code)
            if key not in self._queued:
                self._queued.add(key)
                heapq.heappush(self._heap, candidate)


def _lowest(peaks: np.ndarray) -> int:
    return int(peaks.argmin())


class GreedyMethod:
    """Algorithm 2 on one graph."""

    def __init__(self, costs: GraphCosts, allowed: tuple[Strategy, ...], largest_first: bool) -> None:
        self._costs = costs
        self._allowed = allowed
        self._largest_first = largest_first
        self._freeing: dict[Strategy, tuple[float, float]] = {}
        self._descents: dict[object, _Descent] = {}

    def choose(
        self,
        start: Sequence[Choice],
        available_bytes: int,
        gradients: GradientBytes | None,
        fixed: Mapping[str, Strategy],
    ) -> list[list[Choice]]:
        """Plans to pick from, as choices by segment: `start`, with mitigations added where no site is fixed."""
        free = [bytes(name not in fixed for name in names) for names in self._costs.names]
        # What is on its way up in backward fills up to the copies' bound again, so the first bytes that are offloaded
        # free nothing, and single steps would never start. Hence one plan without offload, and one with that bound
        # set aside.
        without = tuple(strategy for strategy in self._allowed if strategy is not Strategy.OFFLOAD)
        # And one for each strategy alone: where there are several, steps that look best may end in a worse plan.
        ways = dict.fromkeys([without, self._allowed, *((strategy,) for strategy in self._allowed)])
        kept = self._costs.timeline(start, gradients).peak()
        set_aside_bytes = min(self._costs.rates.in_flight_bytes, kept.held_bytes)
        found: list[list[Choice]] = []
        least_seconds = math.inf
        excess_bytes = kept.num_bytes - available_bytes
        for way in ways:
            is_hopeless = len(way) == 1 and found and self._least_seconds(way[0], excess_bytes) >= least_seconds
            if not way or is_hopeless:
                continue
            room_bytes = available_bytes - set_aside_bytes * (Strategy.OFFLOAD in way)
            choices = self._choose(start, free, way, room_bytes, gradients)
            found.append(choices)
            if self._costs.timeline(choices, gradients).peak().num_bytes <= available_bytes:
                least_seconds = min(least_seconds, self._costs.added_seconds(choices))
        return found

    def _least_seconds(self, strategy: Strategy, excess_bytes: int) -> float:
        """A bound: no plan with this strategy alone that frees so many bytes adds less; infinite where none can."""
        if strategy not in self._freeing:
            self._freeing[strategy] = self._costs.freeing(CODE_OF[strategy])
        most_bytes, seconds_per_byte = self._freeing[strategy]
        return math.inf if excess_bytes > most_bytes else excess_bytes * seconds_per_byte

    def _choose(
        self,
        start: Sequence[Choice],
        free: Sequence[bytes],
        allowed: tuple[Strategy, ...],
        room_bytes: int,
        gradients: GradientBytes | None,
    ) -> list[Choice]:
        """Choices that bring the peak, copies on their way left out, to `room_bytes`, or as low as is found."""
        state = self._descent(start, free, allowed, gradients).to(room_bytes)
        if state.timeline.peak().num_bytes > room_bytes:
            everything = [
                self._everything(start, free, first, second, with_layers=with_layers)
                for first in allowed
                for second in allowed
                for with_layers in (True, False)
            ]
            different = dict.fromkeys(map(tuple, everything))
            states = [state, *(self._state(choices, free, gradients) for choices in different)]
            state = min(states, key=lambda one: one.timeline.peak().num_bytes)
        if state.timeline.peak().num_bytes <= room_bytes:
            _roll_back(state, self._costs, room_bytes)
        return state.choices()

    def _descent(
        self,
        start: Sequence[Choice],
        free: Sequence[bytes],
        allowed: tuple[Strategy, ...],
        gradients: GradientBytes | None,
    ) -> _Descent:
        key = (tuple(start), tuple(free), allowed, (gradients or GradientBytes()).key)
        found = self._descents.get(key)
        if found is None:
            codes = tuple(CODE_OF[strategy] for strategy in allowed)
            state = self._state(start, free, gradients)
            found = self._descents[key] = _Descent(state, _Candidates(self._costs, codes, self._largest_first))
        return found

    def _state(self, choices: Sequence[Choice], free: Sequence[bytes], gradients: GradientBytes | None) -> _State:
        return _State.of(self._costs, choices, free, self._costs.timeline(choices, gradients, in_flight_bytes=0))

    def _everything(
        self, start: Sequence[Choice], free: Sequence[bytes], first: Strategy, second: Strategy, *, with_layers: bool
    ) -> list[Choice]:
        """One strategy for all that may still be chosen for, and another one for what it cannot be applied to; layers
        as a whole among them or not."""
        choices = []
        for number, choice, marks in zip(self._costs.class_of, start, free, strict=True):
            structure = self._costs.compiled[number].structure
            allows = structure.allows if with_layers else structure.allows_within
            codes = np.frombuffer(choice, dtype=np.uint8)
            for code in (CODE_OF[second], CODE_OF[first]):
                codes = np.where(allows[:, code] & np.frombuffer(marks, dtype=bool), code, codes)
            choices.append(codes.astype(np.uint8).tobytes())
        return choices


def _roll_back(state: _State, costs: GraphCosts, available_bytes: int) -> None:
    """Undo what later choices made unnecessary, the most expensive first."""
    heap: list[_Candidate] = []

    def push(group: _Group) -> None:
        changes = costs.changes(group.number, group.choice)
        for (operator, code), added_seconds in zip(changes.of, changes.added_seconds.tolist(), strict=True):
            if code == KEEP and group.free[operator] and group.choice[operator] != KEEP and added_seconds < 0:
                heapq.heappush(heap, _Candidate(added_seconds, state.members[group][0], operator, code, group))

    for group in list(state.members):
        push(group)
    while heap:
        _, _, operator, code, group = heapq.heappop(heap)
        if group in state.members:
            number = int(np.flatnonzero(state.peaks(group, operator, code) <= available_bytes)[-1])
            if number:
                push(state.change(group, operator, code, number))
