"""Times of operators: on the host for a CPU device, on the device itself for CUDA, where a launch says nothing."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points of a forward, and tells later what lies between two of them."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def pause(self, since: Any) -> None: ...


class HostClock:
    """Time on the host, less what the engine itself took (writing, casting): that is no cost of the operator."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0

    def mark(self) -> float:
        return time.perf_counter() - self._paused_seconds

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def pause(self, since: float) -> None:
        """Leave out the time since `since` (a mark)."""
        self._paused_seconds += self.mark() - since


class CudaClock:
    """Time on a CUDA stream. Reading it waits for the later mark, so it is read when backward has ended."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def pause(self, since: torch.cuda.Event) -> None:
        """Copies run on streams of their own: nothing to leave out."""


def clock_for(device: torch.device) -> HostClock | CudaClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
