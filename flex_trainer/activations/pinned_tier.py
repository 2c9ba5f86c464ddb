"""The lower tier of a CUDA device: pinned host memory, copied on streams of its own.

A write waits (on the copy stream) for the kernels that made the value; a read makes the compute stream wait for it.
Pinned buffers come in powers of two, are reused, and are bounded in sum: pinning is slow, and pinned memory is taken
from everybody.
"""

from __future__ import annotations

import errno
from collections import defaultdict

import torch

from flex_trainer.units import format_bytes


class _Transfer:
    """A copy on a stream, known by its event."""

    def __init__(self, event: torch.cuda.Event, blocks_host: bool, keep_alive: torch.Tensor) -> None:
        self._event = event
        self._blocks_host = blocks_host
        self._keep_alive: torch.Tensor | None = keep_alive

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        if self._blocks_host:
            self._event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self._event)
        self._keep_alive = None


class PinnedTier:
    """Keeps offloaded storages in at most `max_bytes` of pinned host memory."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._pinned_bytes = 0
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def write(self, source: torch.Tensor) -> tuple[torch.Tensor, _Transfer]:
        whole = self._take(source.numel())
        buffer = whole[: source.numel()]
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            buffer.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._down)
        # The host has to know that the copy ended before it may free the source.
        return whole, _Transfer(event, blocks_host=True, keep_alive=source)

    def read(self, place: torch.Tensor, target: torch.Tensor) -> _Transfer:
        # `target` was allocated on the compute stream, where its memory may still be in use by earlier kernels.
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            target.copy_(place[: target.numel()], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._up)
        target.record_stream(self._up)
        return _Transfer(event, blocks_host=False, keep_alive=place)

    def free(self, place: torch.Tensor) -> None:
        # A read still on its way must end before the buffer is written again; both run on known streams.
        self._down.wait_stream(self._up)
        self._idle[place.numel()].append(place)

    def describe(self) -> str:
        return f"pinned host memory ({format_bytes(self._pinned_bytes)} of {format_bytes(self._max_bytes)} in use)"

    def _take(self, num_bytes: int) -> torch.Tensor:
        # torch's pinned allocator rounds up to a power of two in any case: so buffers are counted, and reused, as such.
        num_bytes = 1 << (max(num_bytes, 1) - 1).bit_length()
        idle = self._idle[num_bytes]
        if idle:
            return idle.pop()
        if self._pinned_bytes + num_bytes > self._max_bytes:
            self._drop_idle(num_bytes)
        if self._pinned_bytes + num_bytes > self._max_bytes:
            raise OSError(errno.ENOMEM, f"no room for {format_bytes(num_bytes)} in {self.describe()}")
        self._pinned_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _drop_idle(self, wanted_bytes: int) -> None:
        """Give idle buffers of other sizes back to torch's pinned allocator."""
        torch.cuda.synchronize(self._device)
        for size, buffers in self._idle.items():
            while buffers and self._pinned_bytes + wanted_bytes > self._max_bytes:
                buffers.pop()
                self._pinned_bytes -= size
