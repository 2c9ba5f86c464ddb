"""An assignment made better: single changes and exchanges of two, while any of them saves time.

The dynamic programme of `assign.py` settles most layers of a deep model beforehand. What it leaves unused of the limit
is often enough to take a mitigation back somewhere, or to pay for one that saves more elsewhere.
"""

from __future__ import annotations

import numpy as np

from flex_trainer.planner.assign import Assignment, AssignmentProblem

_MAX_ROUNDS = 40
_NUM_TRIED = 8
"""Exchanges looked at exactly, in each round."""
_TOLERANCE = 1e-12


def improved(problem: AssignmentProblem, assignment: Assignment) -> Assignment:
    """The assignment, or one that adds less time; its peaks are under their caps too."""
    return _Improvement(problem, assignment.choices).run()


class _Improvement:
    """An assignment and all changes of one segment's choice.

    Segments are in stack order here: the outside first, then the layers.

    Args:
        problem: what is assigned.
        choices: a choice for every layer, then the one for the outside; every peak under its cap.
    """

    def __init__(self, problem: AssignmentProblem, choices: tuple[int, ...]) -> None:
        options = [problem.outside, *(problem.classes[of] for of in problem.class_of)]
        self._caps = np.concatenate([problem.caps[-1:], problem.caps[:-1]])
        self._choices = np.array([choices[-1], *choices[:-1]], dtype=np.int64)
        most = max(len(one.held) for one in options)
        self._held, self._on_top, self._seconds = (
            np.stack([_padded(getattr(one, name), most, fill) for one in options])
            for name, fill in (("held", 0.0), ("on_top", np.inf), ("seconds", np.inf))
        )
        self._at = np.arange(len(options))

    def run(self) -> Assignment:
        for _ in range(_MAX_ROUNDS):
            if not (self._change_one() or self._exchange()):
                break
        choices = self._choices.tolist()
        return Assignment((*choices[1:], choices[0]), float(self._seconds[self._at, self._choices].sum()))

    def _slack(self, choices: np.ndarray) -> np.ndarray:
        """Bytes left under each cap; the outside's, which peaks when all layers have run, first."""
        held = self._held[self._at, choices].cumsum()
        stacks = np.concatenate([held[-1:], held[1:]])
        return self._caps - stacks - self._on_top[self._at, choices]

    def _changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of every change: bytes that it adds to the stack, and seconds that it saves; bytes that it may add for the
        sake of the other segments, and for its own."""
        now = self._at, self._choices
        slack = self._slack(self._choices)
        added = self._held - self._held[now][:, None]
        saved = self._seconds[now][:, None] - self._seconds
        # A layer's bytes are in the stacks of all later layers and of the outside; the outside's are in all.
        later = np.minimum(np.minimum.accumulate(slack[::-1])[::-1], slack[0])
        others = np.concatenate([[slack[1:].min(initial=np.inf)], later[2:], slack[:1]])[: len(slack)]
        own = slack[:, None] + self._on_top[now][:, None] - self._on_top
        return added, saved, others[:, None], own

    def _change_one(self) -> bool:
        added, saved, others, own = self._changes()
        fits = (added <= others) & (added <= own) & (saved > _TOLERANCE)
        if not fits.any():
            return False
        segment, choice = np.unravel_index(np.where(fits, saved, -np.inf).argmax(), saved.shape)
        self._choices[segment] = choice
        return True

    def _exchange(self) -> bool:
        """One segment saves time, another one pays the bytes for it."""
        added, saved, others, own = self._changes()
        slack = self._slack(self._choices)
        gives = (added < 0) & (added <= own) & np.isfinite(saved)
        takes = (added > 0) & (saved > _TOLERANCE)
        if not gives.any() or not takes.any():
            return False
        given, paid = -added[gives], -saved[gives]
        order = given.argsort()[::-1]
        givers = np.flatnonzero(gives)[order]
        given, paid = given[order], paid[order]
        # The cheapest among those that give at least so much.
        cheapest = np.minimum.accumulate(paid)
        index = np.arange(len(paid))
        cheapest_at = np.maximum.accumulate(np.where(paid <= cheapest, index, 0))
        takers = np.flatnonzero(takes)
        missing = added[takes] - np.minimum(slack.min(), others.min())
        num_enough = np.searchsorted(-given, -missing, side="right")
        can = num_enough > 0
        takers, num_enough = takers[can], num_enough[can]
        net = saved.ravel()[takers] - cheapest[num_enough - 1]
        for number in net.argsort()[::-1][:_NUM_TRIED]:
            if net[number] <= _TOLERANCE:
                return False
            pair = takers[number], givers[cheapest_at[num_enough[number] - 1]]
            choices = self._choices.copy()
            segments, new = np.unravel_index(pair, saved.shape)
            choices[segments] = new
            if segments[0] != segments[1] and (self._slack(choices) >= 0).all():
                self._choices = choices
                return True
        return False


def _padded(values: np.ndarray, length: int, fill: float) -> np.ndarray:
    return np.concatenate([values, np.full(length - len(values), fill)])
