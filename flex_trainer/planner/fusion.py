"""Fused execution as data: the stages of four classes that share one device, and orders to run them in.

While micro-batch x runs forward and micro-batch y runs backward on the same device (BaGuaLu-2, section V-B), stages of
four classes wait to be run: forward of x, backward of y, offloads and recoveries. Each class keeps its program order.
Between them they may be interleaved in any way that the bounds allow, so that exchanges of one class between ranks hide
behind the compute of another.

The paper offloads micro-batch x-1 and recovers y+1. Barriers around the window make these independent of x and y, but
only where x - y > 2, that is in a deep pipeline. Here an offload says how many forward stages must have run before it,
and a recovery says which backward stage needs it. So x itself may be offloaded and y itself recovered, which is right
for any x - y, also where there is no pipeline (x - y = 1). With bounds 0 and `len(backward)` it is the paper's case.

A stage ends where its class has to exchange something. The paper says that finer stages give no more overlap. That is
not so in general: a long stage cut in two may hide two short exchanges of the other class instead of one. An order is
the best one for the stages as they are given.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, cycle


class Side(Enum):
    """Whose stage it is."""

    FORWARD = "F"
    BACKWARD = "B"
    OFFLOAD = "O"
    RECOVER = "R"


SIDES = tuple(Side)
FORWARD, BACKWARD, OFFLOAD, RECOVER = range(len(SIDES))
"""Places in `SIDES`."""

Order = tuple[Side, ...]
"""The class of the next stage, for every stage of a window."""


@dataclass(frozen=True)
class Stage:
    """What runs between two exchanges of a class."""

    name: str
    seconds: float
    """Compute."""
    exchange_seconds: float = 0.0
    """Of the exchange that it starts when it ends; 0: none."""
    copy_seconds: float = 0.0
    """Of the copy to or from the device that it starts when it begins; 0: none."""
    held_bytes: int = 0
    """Change of what is held, once it has run."""
    peak_bytes: int = 0
    """Needed while it runs, on top of what is held when it begins."""
    bound: int = 0
    """Of an offload: forward stages that must have run before. Of a recovery: the backward stage that waits for it;
    `len(backward)`: none does. Otherwise 0."""

    def __post_init__(self) -> None:
        times = (self.seconds, self.exchange_seconds, self.copy_seconds)
        if min(*times, self.peak_bytes, self.bound) < 0:
            raise ValueError(f"stage {self.name!r} has a negative time, peak or bound: {self}.")


@dataclass(frozen=True)
class Window:
    """The stages to run at one scheduling point, each class in program order.

    Ranks that run a window together must be given equal numbers: from these alone follows the order, in which their
    collectives are issued. Times count to the nanosecond.

    Raises:
        ValueError: a bound points outside of the window, or a forward or backward stage has one.
    """

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    offloads: tuple[Stage, ...] = ()
    recoveries: tuple[Stage, ...] = ()
    start_bytes: int = 0
    """Held at the start."""

    def __post_init__(self) -> None:
        highest = (0, 0, len(self.forward), len(self.backward))
        for side, stages, most in zip(SIDES, self.stages, highest, strict=True):
            for stage in stages:
                if stage.bound > most:
                    raise ValueError(f"stage {stage.name!r} of class {side.value} has bound {stage.bound} > {most}.")

    @functools.cached_property
    def stages(self) -> tuple[tuple[Stage, ...], ...]:
        """By class, as in `SIDES`."""
        return self.forward, self.backward, self.offloads, self.recoveries

    @functools.cached_property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))

    @functools.cached_property
    def forward_before(self) -> tuple[int, ...]:
        """For each offload, the forward stages that must have run."""
        return tuple(accumulate((stage.bound for stage in self.offloads), max))

    @functools.cached_property
    def recoveries_before(self) -> tuple[int, ...]:
        """For each backward stage, the recoveries that must have run."""
        numbers = [0] * (len(self.backward) + 1)
        for number, stage in enumerate(self.recoveries, start=1):
            numbers[stage.bound] = number
        return tuple(accumulate(numbers[:-1], max))

    def may_run(self, side: int, done: list[int]) -> bool:
        """Whether a class has a stage left whose bounds allow it to be the next one.

        Args:
            side: a place in `SIDES`.
            done: stages that have run, by class.
        """
        number = done[side]
        if number == len(self.stages[side]):
            return False
        if side == OFFLOAD:
            return self.forward_before[number] <= done[FORWARD]
        if side == BACKWARD:
            return self.recoveries_before[number] <= done[RECOVER]
        return True


def sequential(window: Window) -> Order:
    """All of backward, then all of forward: what accumulating gradients does, from the backward of y on."""
    return fixed(window, "B")


def fixed(window: Window, pattern: str) -> Order:
    """An order that does not look at times, such as Megatron's: the pattern of a layer, again and again.

    Offloads go in as early and recoveries as late as their bounds allow. What is left of a class when the other one has
    ended follows.

    Args:
        window: the stages.
        pattern: letters F and B, such as "BFFBF".

    Raises:
        ValueError: a pattern that is empty or has other letters.
    """
    if not pattern or set(pattern) - set("FB"):
        raise ValueError(f"The pattern of a fixed order is {pattern!r}; it takes letters F and B, at least one.")
    order: list[Side] = []
    done = [0] * len(SIDES)

    def run(side: int) -> None:
        order.append(SIDES[side])
        done[side] += 1

    letters = cycle(pattern)
    num_both = len(window.forward) + len(window.backward)
    while done[FORWARD] + done[BACKWARD] < num_both:
        while window.may_run(OFFLOAD, done):
            run(OFFLOAD)
        side = FORWARD if next(letters) == "F" else BACKWARD
        if done[side] == len(window.stages[side]):
            side = FORWARD + BACKWARD - side
        while side == BACKWARD and not window.may_run(BACKWARD, done):
            run(RECOVER)
        run(side)
    for side in (OFFLOAD, RECOVER):
        while window.may_run(side, done):
            run(side)
    return tuple(order)
