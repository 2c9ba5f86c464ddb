"""Times of operators: on the host for a CPU device, on the device itself for CUDA, where a launch says nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch


class Clock(Protocol):
    """Marks points of a forward, and tells later what lies between two of them."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float:
        """What lies between two marks. Each mark is read once."""
        ...

    def pause(self, since: Any) -> None:
        """Leave out the time since `since`, the latest mark: the engine's own work (copying, casting) is no cost of
        the operator that runs."""
        ...


class HostClock:
    """Time on the host."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0

    def mark(self) -> float:
        return time.perf_counter() - self._paused_seconds

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def pause(self, since: float) -> None:
        self._paused_seconds += self.mark() - since


class _Mark(NamedTuple):
    event: Any
    num_pauses: int
    """Pauses before this mark."""


class EventPool:
    """CUDA events that were read are used again: two are recorded for every operator of every micro-batch."""

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self._make = make or (lambda: torch.cuda.Event(enable_timing=True))
        self._idle: list[Any] = []

    def take(self) -> Any:
        return self._idle.pop() if self._idle else self._make()

    def give(self, event: Any) -> None:
        self._idle.append(event)


class CudaClock:
    """Time on the stream that computes. Marks and pauses never wait; reading waits for the later mark, so it is left
    until backward has been launched.

    Args:
        current_stream: the stream on which this thread computes now.
        events: shared by the clocks of one run.
    """

    def __init__(self, current_stream: Callable[[], Any], events: EventPool) -> None:
        self._current_stream = current_stream
        self._events = events
        self._pauses: list[tuple[_Mark, _Mark]] = []
        self._paused_until: list[float] | None = None  # seconds of the first n pauses, once one was asked for

    def mark(self) -> _Mark:
        event = self._events.take()
        event.record(self._current_stream())
        return _Mark(event, len(self._pauses))

    def seconds(self, start: _Mark, end: _Mark) -> float:
        if self._paused_until is None or len(self._paused_until) <= len(self._pauses):
            self._paused_until = list(accumulate((_between(*pause) for pause in self._pauses), initial=0.0))
        paused_seconds = self._paused_until[end.num_pauses] - self._paused_until[start.num_pauses]
        seconds = _between(start, end) - paused_seconds
        self._events.give(start.event)
        self._events.give(end.event)
        return max(seconds, 0.0)

    def pause(self, since: _Mark) -> None:
        # On the device a copy on another stream takes no time here; a cast, or waiting for room in flight, does.
        self._pauses.append((since, self.mark()))


def clocks_for(device: torch.device) -> Callable[[], Clock]:
    """Makes the clocks of a run on `device`, one for each micro-batch."""
    if device.type != "cuda":
        return HostClock
    events = EventPool()
    return lambda: CudaClock(lambda: torch.cuda.current_stream(device), events)


def _between(start: _Mark, end: _Mark) -> float:
    end.event.synchronize()
    return start.event.elapsed_time(end.event) / 1e3
