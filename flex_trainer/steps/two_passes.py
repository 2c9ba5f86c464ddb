"""FSDP2 with a forward and a backward of two micro-batches in one model at a time: each finds what it left.

A forward is inside of the root, whose weights are gathered, when the runtime hears of it. So the state that is found
stays the forward's, with an order of its own; the backward gets the order of its own forward, and is in no unit yet.
A unit stays gathered while either side is inside of it, and is let go when neither is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flex_trainer.compat import FsdpPassState
from flex_trainer.experts.handover import Exchange, Work
from flex_trainer.planner.fusion import Side
from flex_trainer.steps.turns import other_side
from flex_trainer.undo import replace_attribute

WaitForGather = Callable[[Sequence[Work], Exchange, int], None]
"""Takes the works, what they exchange, and the number of the group of parameters."""


class TwoPasses:
    """Exchanges what FSDP2 notes whenever the other side runs.

    Args:
        passes: of the model.
        gradient_flags: of the backward (`FsdpPassState.gradient_flags`).
        wait: waits for a gather of weights.
    """

    def __init__(
        self,
        passes: FsdpPassState,
        gradient_flags: list[tuple[bool, bool]],
        wait: WaitForGather,
    ) -> None:
        self._passes = passes
        self._backward_flags = gradient_flags
        self._wait = wait
        self._taken: dict[Side, Any] = {}
        self._side = Side.FORWARD
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """The forward runs, or nothing."""
        self._taken[Side.BACKWARD] = self._passes.waiting(self._backward_flags)
        self._passes.begin_forward()
        self._taken[Side.FORWARD] = self._passes.taken()
        self._undo += watch_gathers(self._passes, self._wait)
        for number, group in enumerate(self._passes.groups):
            reshard = functools.partial(self._reshard, number, group.reshard)
            self._undo.append(replace_attribute(group, "reshard", reshard))

    def switch(self, to: Side) -> None:
        if to is not self._side:
            self._taken[self._side] = self._passes.taken()
            self._passes.put(self._taken[to])
            self._side = to

    def end(self) -> None:
        self.switch(Side.FORWARD)
        while self._undo:
            self._undo.pop()()

    def _reshard(self, number: int, original: Callable[[], None]) -> None:
        if not self._passes.is_inside(self._taken[other_side(self._side)], number):
            original()


def watch_gathers(passes: FsdpPassState, wait: WaitForGather) -> list[Callable[[], None]]:
    """Have a gather of weights started, and then `wait` called, wherever a unit is entered: also where it is still
    gathered, so that the stages of all passes are the same ones. Returns what ends that."""

    def wait_for_unshard(number: int, group: Any, original: Callable[[], None]) -> None:
        wait(passes.gather_under_way(group), Exchange.GATHER, number)
        original()

    undo: list[Callable[[], None]] = []
    for number, group in enumerate(passes.groups):
        gather = functools.partial(wait_for_unshard, number, group, group.wait_for_unshard)
        undo += [
            replace_attribute(group, "wait_for_unshard", gather),
            replace_attribute(group, "unshard_async_op", True),  # on a CPU gathers return at once
        ]
    return undo
