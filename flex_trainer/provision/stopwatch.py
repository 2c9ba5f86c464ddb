"""Time of a micro-batch's forward and backward: on the host for a CPU device, on the device itself for CUDA."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Adds up laps. On CUDA a lap goes from one event of the computing stream to another, and nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: Any = None
        self._laps: list[tuple[Any, Any]] = []

    @property
    def num_laps(self) -> int:
        return len(self._laps)

    @property
    def is_on_host(self) -> bool:
        """Whether it reads the host's time."""
        return self._device.type != "cuda"

    def start(self) -> None:
        """Begin a lap; of no effect while one runs."""
        if self._start is None:
            self._start = self._mark()

    def stop(self) -> None:
        """End the lap; of no effect where none was begun."""
        if self._start is not None:
            self._laps.append((self._start, self._mark()))
            self._start = None

    def pause(self) -> bool:
        """End the lap, to begin another one later. Returns whether one was running."""
        is_running = self._start is not None
        self.stop()
        return is_running

    def is_read(self) -> bool:
        """Whether reading would wait for nothing."""
        return self._device.type != "cuda" or all(end.query() for _, end in self._laps)

    def seconds(self) -> float:
        """Sum of all laps; waits for the device where `is_read` is false."""
        if self._device.type != "cuda":
            return sum(end - start for start, end in self._laps)
        for _, end in self._laps:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._laps) / 1e3

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
