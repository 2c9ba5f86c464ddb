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
        wait: Callable[[Sequence[Work], Exchange], None],
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
        for number, group in enumerate(self._passes.groups):
            reshard = functools.partial(self._reshard, number, group.reshard)
            gather = functools.partial(self._wait_for_gather, group, group.wait_for_unshard)
            self._undo += [
                replace_attribute(group, "reshard", reshard),
                replace_attribute(group, "wait_for_unshard", gather),
                replace_attribute(group, "unshard_async_op", True),  # on a CPU gathers return at once
            ]

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

    def _wait_for_gather(self, group: Any, original: Callable[[], None]) -> None:
        works = self._passes.gather_under_way(group)
        if works is not None:
            self._wait(works, Exchange.GATHER)
        original()
