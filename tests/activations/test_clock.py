"""Clocks: nested operators, the engine's own work left out, and events used again."""

from __future__ import annotations

import time

import pytest
import torch

from flex_trainer.activations.clock import CudaClock, EventPool, HostClock, clocks_for
from tests.activations.fake_streams import FakeDevice, FakeEvent


def test_host_clock_leaves_pauses_out():
    clock = HostClock()
    began = time.perf_counter()
    start = clock.mark()
    time.sleep(0.01)
    pause = clock.mark()
    time.sleep(0.05)
    clock.pause(pause)
    assert 0.01 <= clock.seconds(start, clock.mark()) <= time.perf_counter() - began - 0.05


def test_clocks_of_a_cpu():
    assert isinstance(clocks_for(torch.device("cpu"))(), HostClock)
    make = clocks_for(torch.device("cpu"))
    assert make() is not make()


class Timed:
    """Work of known length on a fake stream. The fake scheduler adds 1 ms for each step it takes."""

    def __init__(self) -> None:
        self.device = FakeDevice(0)
        self.num_events = 0
        self.events = EventPool(self._make)

    def _make(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self.device)

    def clock(self) -> CudaClock:
        return CudaClock(self.device.current, self.events)

    def work(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.device.compute.push(lambda: None)


def test_cuda_clock_measures_the_stream_and_not_the_launch():
    timed = Timed()
    clock = timed.clock()
    outer = clock.mark()
    timed.work(3)
    inner = clock.mark()
    timed.work(10)
    inner_end = clock.mark()
    pause = clock.mark()
    timed.work(50)  # a cast of the engine
    clock.pause(pause)
    timed.work(2)
    outer_end = clock.mark()
    assert timed.device.num_host_waits == 0 and timed.device.seconds == 0, "nothing has run yet"
    # Every mark is a step of the fake stream itself.
    assert clock.seconds(inner, inner_end) == pytest.approx(0.011)
    assert clock.seconds(outer, outer_end) == pytest.approx(0.001 * (3 + 1 + 10 + 1 + 1 + 2 + 1))


def test_a_pause_outside_changes_nothing():
    timed = Timed()
    clock = timed.clock()
    clock.pause(clock.mark())
    start = clock.mark()
    timed.work(5)
    end = clock.mark()
    timed.work(5)
    clock.pause(clock.mark())
    assert clock.seconds(start, end) == pytest.approx(0.006)


def test_events_are_used_again():
    timed = Timed()
    for _ in range(5):
        clock = timed.clock()
        marks = []
        for _ in range(20):
            start = clock.mark()
            timed.work(1)
            marks.append((start, clock.mark()))
        assert [clock.seconds(*pair) for pair in marks] == pytest.approx([0.002] * 20)
    assert timed.num_events == 40


def test_marks_follow_the_current_stream():
    timed = Timed()
    clock = timed.clock()
    side = timed.device.stream("side")
    with timed.device.on(side):
        start = clock.mark()
        side.push(lambda: None)
        end = clock.mark()
    assert clock.seconds(start, end) == pytest.approx(0.002)


def test_reading_in_the_middle_of_a_forward():
    """A re-plan reads the operators that have run; the block around them goes on, with pauses to come."""
    timed = Timed()
    clock = timed.clock()
    outer = clock.mark()
    clock.pause(clock.mark())
    inner = clock.mark()
    timed.work(1)
    assert clock.seconds(inner, clock.mark()) == pytest.approx(0.002)
    pause = clock.mark()
    timed.work(30)
    clock.pause(pause)
    assert clock.seconds(outer, clock.mark()) < 0.012
