"""Least added time under the limit: the choices worth having per class, then one for every segment.

    1. planner/frontier.py   for each class of equal segments, the choices that no other beats
    2. planner/assign.py     one of them for every segment: least seconds, every layer's peak under the limit

Two things tie the segments together beyond the stack of held bytes, and are settled before step 2: whether values that
recomputes share (an attention mask) are held at all, each way in turn; and from which segment on anything is offloaded,
each in turn in shallow models, else the first, the last, and none. Copies on their way fill up to their bound once
enough is offloaded, so behind that segment the bound is set aside. (Less in flight than the bound means that what is on
its way is all that was offloaded: nothing was gained by it.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from flex_trainer.cost.compiled import CODE_OF, CODES, CompiledSegment
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.planner.assign import Assignment, AssignmentProblem, Options
from flex_trainer.planner.choice import Choice
from flex_trainer.planner.frontier import Choices, Freedom, choices_of, with_neighbours
from flex_trainer.planner.graph_costs import GraphCosts
from flex_trainer.planner.improve import improved
from flex_trainer.planner.search import search
from flex_trainer.strategy import Strategy

_FREE = 255
"""Mark of an operator whose strategy is not fixed, where the others have numbers into `CODES`."""


@dataclass(frozen=True)
class _Width:
    """How widely to look, so that the time for it stays the same."""

    num_layers: int
    """For models with up to this many layers."""
    max_labels: int
    num_choices: int
    num_free: int
    num_refinements: int
    tries_all_starts: bool
    close_enough: float
    """A plan is looked for as long as it may be better than this share of the best one's time."""


_WIDTHS = (
    _Width(4, max_labels=400, num_choices=400, num_free=4, num_refinements=3, tries_all_starts=True, close_enough=1.0),
    _Width(
        16, max_labels=120, num_choices=40, num_free=16, num_refinements=1, tries_all_starts=False, close_enough=1.0
    ),
    _Width(
        2**20,
        max_labels=48,
        num_choices=12,
        num_free=10,
        num_refinements=0,
        tries_all_starts=False,
        close_enough=0.998,
    ),
)


class OptimalMethod:
    """The time-optimal planner on one graph."""

    def __init__(self, costs: GraphCosts, allowed: tuple[Strategy, ...]) -> None:
        self._costs = costs
        self._allowed = np.array([code is Strategy.KEEP or code in allowed for code in CODES])
        self._choices: dict[tuple[int, bytes], Choices] = {}
        self._width = next(width for width in _WIDTHS if len(costs.segments) - 1 <= width.num_layers)

    def choose(
        self, available_bytes: int, gradients: GradientBytes | None, fixed: Mapping[str, Strategy]
    ) -> list[Choice]:
        """Choices by segment: those that add least seconds of what is found; the minimum-memory ones where nothing
        fits."""
        keys = [self._key(index, fixed) for index in range(len(self._costs.segments))]
        classes = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        class_of = [classes[key] for key in keys]
        caps = available_bytes - self._costs.gradients_by_segment(gradients)
        choices = [self._choices_of(key) for key in classes]
        trials = self._trials(choices, class_of, caps)
        found = self._solve(trials, math.inf)
        if found is None:
            plans = [self._chosen(trial, trial.problem.least(), choices, keys, class_of) for trial in trials]
            return min(plans, key=lambda plan: self._costs.timeline(plan, gradients).peak().num_bytes)
        for _ in range(self._width.num_refinements):
            # Where there are few segments, one choice is a large step: look closely around the ones taken.
            used = [set() for _ in choices]
            for number, row in zip(class_of, found[0].rows(found[1]), strict=True):
                used[number].add(row)
            closer = [
                with_neighbours(*self._question(key), one, np.array(sorted(rows)))
                for key, one, rows in zip(classes, choices, used, strict=True)
            ]
            better = self._solve(self._trials(closer, class_of, caps), found[1].seconds)
            if better is None:
                break
            found, choices = better, closer
        return self._chosen(*found, choices, keys, class_of)

    def _trials(self, choices: list[Choices], class_of: list[int], caps: np.ndarray) -> list[_Trial]:
        """One problem for each way to settle what ties the segments together."""
        trials: list[_Trial] = []
        shares = (False, True) if any(one.costs.shared.any() for one in choices) else (False,)
        for start, takes_shared in product(self._starts(choices, class_of), shares):
            trial = self._trial(choices, class_of, caps, start, takes_shared)
            if trial is not None:  # else what has run already does it the other way
                trials.append(trial)
        return trials

    def _starts(self, choices: list[Choices], class_of: list[int]) -> list[int]:
        """Segments from which on something may be offloaded; their number: nothing is."""
        num = len(class_of)
        if not any((one.costs.offloaded > 0).any() for one in choices):
            return [num]
        if self._costs.rates.in_flight_bytes == 0:
            return [0]
        inner = range(num) if self._width.tries_all_starts else (0, num - 1)
        return sorted({*inner, num})

    def _trial(
        self, choices: list[Choices], class_of: list[int], caps: np.ndarray, start: int, takes_shared: bool
    ) -> _Trial | None:
        bound_bytes = self._costs.rates.in_flight_bytes
        entries: dict[tuple[int, bool, bool], int] = {}
        kept: list[np.ndarray] = []
        options: list[Options] = []
        trial_class_of = []
        for index, number in enumerate(class_of):
            entry = (number, index >= start, index == start)
            if entry not in entries:
                entries[entry] = len(kept)
                rows = _kept(choices[number], entry[1], takes_shared)
                if not len(rows):
                    return None
                costs = choices[number].costs.rows(rows)
                on_top = costs.on_top
                if entry[2]:
                    on_top = on_top + np.minimum(costs.offloaded, bound_bytes)
                kept.append(rows)
                options.append(Options(costs.held, costs.seconds, on_top))
            trial_class_of.append(entries[entry])
        taken = np.full(len(caps), sum(self._costs.shared_bytes) if takes_shared else 0)
        taken[start + 1 :] += bound_bytes
        return _Trial(AssignmentProblem(options, trial_class_of, caps - taken), kept, trial_class_of)

    def _chosen(
        self,
        trial: _Trial,
        assignment: Assignment,
        choices: list[Choices],
        keys: list[tuple[int, bytes]],
        class_of: list[int],
    ) -> list[Choice]:
        """Strategies by segment; what they cost is known already."""
        rows = trial.rows(assignment)
        chosen = {(number, row): _choice(choices[number], row) for number, row in zip(class_of, rows, strict=True)}
        for key, number, row in set(zip(keys, class_of, rows, strict=True)):
            self._costs.remember(key[0], chosen[number, row], choices[number].costs.one(row))
        return [chosen[at] for at in zip(class_of, rows, strict=True)]

    def _solve(self, trials: list[_Trial], below_seconds: float) -> tuple[_Trial, Assignment] | None:
        """The best plan over all trials and choices for the outside that adds less than `below_seconds`."""
        width = self._width
        order = sorted(
            (bound, number, outside)
            for number, trial in enumerate(trials)
            for outside, bound in enumerate(trial.problem.bounds.tolist())
        )
        best: tuple[_Trial, Assignment] | None = None
        for bound, number, outside in order:  # the most promising ones first
            seconds = below_seconds if best is None else best[1].seconds * width.close_enough
            if bound >= seconds:
                break
            found = trials[number].problem.solve(outside, width.max_labels, width.num_choices, width.num_free, seconds)
            if found is not None:
                best = trials[number], improved(trials[number].problem, found)
        return best

    def _key(self, index: int, fixed: Mapping[str, Strategy]) -> tuple[int, bytes]:
        """The class of a segment, and what is fixed in it."""
        number = self._costs.class_of[index]
        if not fixed:
            return number, b""
        codes = bytes(CODE_OF[fixed[name]] if name in fixed else _FREE for name in self._costs.names[index])
        return number, codes if codes.strip(bytes((_FREE,))) else b""

    def _question(self, key: tuple[int, bytes]) -> tuple[CompiledSegment, Freedom]:
        """Sizes and times of a class, and what may be chosen in it."""
        number, marks = key
        compiled = self._costs.compiled[number]
        if marks:
            fixed = np.frombuffer(marks, dtype=np.uint8).astype(np.int64)
            fixed = np.where(fixed == _FREE, -1, fixed)
        else:
            fixed = np.full(compiled.structure.num_operators, -1)
        return compiled, Freedom(self._allowed, fixed, self._costs.rates.in_flight_bytes == 0)

    def _choices_of(self, key: tuple[int, bytes]) -> Choices:
        found = self._choices.get(key)
        if found is None:
            compiled, freedom = self._question(key)
            pools, question = compiled.structure.pools, (self._allowed.tobytes(), freedom.has_free_offload)
            if question not in pools:
                pools[question] = search(compiled, freedom)
            found = self._choices[key] = choices_of(compiled, freedom, pools[question])
        return found


@dataclass(frozen=True)
class _Trial:
    """One way to settle what ties the segments together."""

    problem: AssignmentProblem
    kept: list[np.ndarray]
    """By class of the problem: the choices that agree with it."""
    class_of: list[int]
    """The problem's class of each segment."""

    def rows(self, assignment: Assignment) -> list[int]:
        """The choice of each segment, among all choices of its class."""
        pairs = zip(self.class_of, assignment.choices, strict=True)
        return [int(self.kept[number][one]) for number, one in pairs]


def _kept(choices: Choices, offloads: bool, shares: bool) -> np.ndarray:
    """The choices that a trial may use."""
    may = np.ones(len(choices), dtype=bool)
    if not offloads:
        may &= choices.costs.offloaded == 0
    if not shares:
        may &= ~choices.costs.shared.any(axis=1)
    return np.flatnonzero(may)


def _choice(choices: Choices, row: int) -> Choice:
    return choices.codes[row].astype(np.uint8).tobytes()
