"""What an order of a window costs: run its stages through the three lanes of a device.

    compute   runs the stages in the given order, one at a time
    network   serves exchanges one at a time, in the order in which they are started
    copy      serves offload and reload copies in the same way

A stage begins when the compute lane is free, the exchange before it in its class has ended and, if it is a backward
stage, the copies of the recoveries it needs have ended. Until then the compute lane waits: what comes next never
depends on what happens to be ready, since all ranks must issue their collectives in the same order. Its copy is started
when it begins and its exchange when it ends. Stages of one class do not wait for the copies of each other.

Memory counts as if a stage took what it adds before it ends, and a copy freed what it moves when its stage ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from flex_trainer.planner.fusion import BACKWARD, RECOVER, SIDES, Order, Side, Window


class Lane(Enum):
    """What does one thing at a time."""

    COMPUTE = "compute"
    NETWORK = "network"
    COPY = "copy"


class Span(NamedTuple):
    """When a stage occupied a lane, in seconds from the start of the window."""

    lane: Lane
    side: Side
    stage: int
    """Index into its class."""
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class FusedCost:
    """Time and memory of a window run in one order."""

    seconds: float
    """Until all stages, exchanges and copies have ended."""
    peak_bytes: int
    """Most that is held and needed at one time."""
    exposed_seconds: float
    """The compute lane waits for exchanges."""
    hidden_seconds: float
    """The rest of the time that exchanges take."""
    copy_wait_seconds: float
    """The compute lane waits for copies only."""
    spans: tuple[Span, ...]
    """In the order in which they were started."""


def nanoseconds(seconds: float) -> int:
    """Times are added up as whole numbers, so that all machines come to the same sums."""
    return round(seconds * 1e9)


def simulate(window: Window, order: Order) -> FusedCost:
    """Run a window in one order.

    Raises:
        ValueError: the order does not run every stage once, or runs one before its bound allows it.
    """
    done = [0] * len(SIDES)
    now = network_free = copy_free = waited = 0
    ready = [0] * len(SIDES)
    copied = [0] * (len(window.recoveries) + 1)
    """By number of recoveries: when the copies of the first so many end."""
    held = peak = window.start_bytes
    spans: list[tuple[Lane, Side, int, int, int]] = []
    for one in order:
        side = SIDES.index(one)
        number = done[side]
        if not window.may_run(side, done):
            raise ValueError(f"Stage {number} of class {one.value} cannot run where the order has it, after {done}.")
        stage = window.stages[side][number]
        start = max(now, ready[side])
        waited += start - now
        if side == BACKWARD:
            start = max(start, copied[window.recoveries_before[number]])
        now = start + nanoseconds(stage.seconds)
        spans.append((Lane.COMPUTE, one, number, start, now))
        if copy := nanoseconds(stage.copy_seconds):
            begin = max(start, copy_free)
            copy_free = begin + copy
            spans.append((Lane.COPY, one, number, begin, copy_free))
        if side == RECOVER:
            copied[number + 1] = copy_free if copy else copied[number]
        if exchange := nanoseconds(stage.exchange_seconds):
            begin = max(now, network_free)
            ready[side] = network_free = begin + exchange
            spans.append((Lane.NETWORK, one, number, begin, network_free))
        peak = max(peak, held + stage.peak_bytes, held + stage.held_bytes)
        held += stage.held_bytes
        done[side] += 1
    if sum(done) != window.num_stages:
        raise ValueError(f"The order runs {sum(done)} stages of {window.num_stages}: {done}.")
    end = max(now, network_free, copy_free)
    waited += max(network_free - now, 0)
    computed = sum(last - first for lane, _, _, first, last in spans if lane is Lane.COMPUTE)
    exchanged = sum(last - first for lane, _, _, first, last in spans if lane is Lane.NETWORK)
    return FusedCost(
        seconds=end / 1e9,
        peak_bytes=peak,
        exposed_seconds=waited / 1e9,
        hidden_seconds=(exchanged - waited) / 1e9,
        copy_wait_seconds=(end - computed - waited) / 1e9,
        spans=tuple(Span(lane, side, number, first / 1e9, last / 1e9) for lane, side, number, first, last in spans),
    )
