"""The lower tier of a CUDA device: pinned host memory, copied on streams of its own.

The host never waits for a copy. Order comes from events, between the stream that computes and the two that copy:

    write     the down stream waits for the kernels that made the value, and copies
    release   the computing stream waits for that event; from then on the source's memory may be given to others, since
              torch's allocator hands it out again in the order of that stream
    read      the up stream waits for the write of the buffer and for earlier kernels in the target's memory, and
              copies; the user of the target makes its stream wait for that event
    free      the buffer goes to the next write at once, which has the down stream wait for the buffer's last read

Pinned buffers come in powers of two (torch's pinned allocator rounds up to them in any case), are used again, and are
bounded in sum: pinning is slow, and pinned memory is not available to other processes. Buffers that were not needed for
a while are given back.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from typing import Any, Protocol

import torch

from flex_trainer.activations.copy_streams import CopyStreams
from flex_trainer.activations.ledger import CopyTime
from flex_trainer.units import format_bytes

_TRIM_INTERVAL = 64
"""Calls of `trim` (one per micro-batch) between two looks at what is needed."""
_SPARE_FACTOR = 1.5
"""Idle buffers are kept up to this many times what was in use at most since the last look."""


class Streams(Protocol):
    """What the tier needs of a device; see `CopyStreams`."""

    down: Any
    up: Any

    def current(self) -> Any: ...

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any: ...

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None: ...

    def pin(self, num_bytes: int) -> torch.Tensor: ...

    def unpin_cached(self) -> None: ...


class _Buffer:
    """Pinned memory, and the events of the last copies from and to it."""

    __slots__ = ("memory", "read", "written")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.written: Any = None
        self.read: Any = None

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()


class _Write:
    """A copy down. Waiting for it means that the stream which computed the source does."""

    def __init__(self, streams: Streams, event: Any, source: torch.Tensor) -> None:
        self._streams = streams
        self._event = event
        self._source: torch.Tensor | None = source
        self._home = streams.current()

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self.release()

    def release(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._home.wait_event(self._event)
            # Of no effect, unless the source was allocated on another stream than the one that computes.
            self._streams.keep_for(source, self._home)

    def time(self) -> CopyTime | None:
        return None  # what copies beside compute cost is learnt from the step's time


class _Read:
    """A copy up."""

    def __init__(self, streams: Streams, event: Any, target: torch.Tensor) -> None:
        self._streams = streams
        self._event = event
        self._target = target
        self._home = streams.current()
        self._is_home_behind = False

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self.release()
        user = self._streams.current()
        if user != self._home:
            user.wait_event(self._event)
            self._streams.keep_for(self._target, user)

    def release(self) -> None:
        # The target's memory goes back to the stream it was allocated on.
        if not self._is_home_behind:
            self._home.wait_event(self._event)
            self._is_home_behind = True

    def time(self) -> CopyTime | None:
        return None


class PinnedTier:
    """Keeps offloaded storages in at most `max_bytes` of pinned host memory.

    Args:
        device: a CUDA device with an index.
        max_bytes: bound on the pinned bytes, idle buffers included.
        streams: how to copy; on streams of the device when None.
    """

    def __init__(self, device: torch.device, max_bytes: int, streams: Streams | None = None) -> None:
        self._streams: Streams = CopyStreams(device) if streams is None else streams
        self._max_bytes = max_bytes
        self._pinned_bytes = 0
        self._in_use_bytes = 0
        self._most_in_use_bytes = 0  # since the last look of `trim`
        self._num_trims = 0
        self._idle: dict[int, list[_Buffer]] = {}
        # A value may die inside any allocation, also one of ours: freeing only notes the buffer.
        self._freed: deque[_Buffer] = deque()
        self._lock = threading.RLock()

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory held, idle buffers included."""
        return self._pinned_bytes

    def write(self, source: torch.Tensor) -> tuple[_Buffer, _Write]:
        streams = self._streams
        with self._lock:
            buffer = self._take(source.numel())
            if buffer.read is not None:
                streams.down.wait_event(buffer.read)
                buffer.read = None
            streams.down.wait_stream(streams.current())
            buffer.written = streams.copy(streams.down, buffer.memory[: source.numel()], source)
        return buffer, _Write(streams, buffer.written, source)

    def read(self, place: _Buffer, target: torch.Tensor) -> _Read:
        streams = self._streams
        with self._lock:
            streams.up.wait_event(place.written)
            # The target was allocated on the computing stream, where its memory may still be in use by earlier kernels.
            streams.up.wait_stream(streams.current())
            place.read = streams.copy(streams.up, target, place.memory[: target.numel()])
        return _Read(streams, place.read, target)

    def free(self, place: _Buffer) -> None:
        self._freed.append(place)

    def describe(self) -> str:
        return f"pinned host memory ({format_bytes(self._pinned_bytes)} of {format_bytes(self._max_bytes)} taken)"

    def trim(self) -> None:
        """Give back buffers that were not needed lately; called once per micro-batch."""
        with self._lock:
            self._num_trims += 1
            if self._num_trims % _TRIM_INTERVAL:
                return
            self._collect_freed()
            wanted_bytes = int(_SPARE_FACTOR * self._most_in_use_bytes)
            self._most_in_use_bytes = self._in_use_bytes
            if self._pinned_bytes > wanted_bytes and self._idle:
                self._drop_idle(down_to_bytes=wanted_bytes)

    def _take(self, num_bytes: int) -> _Buffer:
        """An idle buffer of the right size, a new one, a larger idle one; in this order.

        Raises:
            OSError: the bound is reached, or the system does not pin more.
        """
        self._collect_freed()
        size = 1 << (max(num_bytes, 1) - 1).bit_length()
        buffer = self._pop_idle(size)
        if buffer is None and self._pinned_bytes + size > self._max_bytes:
            larger = [idle_size for idle_size in self._idle if idle_size > size]
            buffer = self._pop_idle(min(larger)) if larger else None
        if buffer is None:
            buffer = self._pin(size)
        self._in_use_bytes += buffer.num_bytes
        self._most_in_use_bytes = max(self._most_in_use_bytes, self._in_use_bytes)
        return buffer

    def _pin(self, size: int) -> _Buffer:
        if self._pinned_bytes + size > self._max_bytes:
            self._drop_idle(down_to_bytes=self._max_bytes - size)
        if self._pinned_bytes + size > self._max_bytes:
            raise OSError(errno.ENOMEM, f"no room for {format_bytes(size)} more in the pool of {self.describe()}")
        try:
            memory = self._streams.pin(size)
        except RuntimeError as first:  # the system has less than the bound allows
            self._drop_idle(down_to_bytes=0)
            try:
                memory = self._streams.pin(size)
            except RuntimeError:
                # The host's memory is out, not the device's: for the store, a tier that refuses.
                raise OSError(
                    errno.ENOMEM, f"the system does not pin {format_bytes(size)} more of host memory: {first}"
                ) from first
        self._pinned_bytes += size
        return _Buffer(memory)

    def _pop_idle(self, size: int) -> _Buffer | None:
        buffers = self._idle.get(size)
        if not buffers:
            return None
        buffer = buffers.pop()
        if not buffers:
            del self._idle[size]
        return buffer

    def _collect_freed(self) -> None:
        while self._freed:
            buffer = self._freed.popleft()
            self._in_use_bytes -= buffer.num_bytes
            self._idle.setdefault(buffer.num_bytes, []).append(buffer)

    def _drop_idle(self, down_to_bytes: int) -> None:
        """Give idle buffers back to the system, largest first, until so much is pinned or none is idle."""
        dropped: list[_Buffer] = []
        while self._idle and self._pinned_bytes > max(down_to_bytes, 0):
            buffer = self._pop_idle(max(self._idle))
            assert buffer is not None
            self._pinned_bytes -= buffer.num_bytes
            dropped.append(buffer)
        if dropped:
            # Dropped buffers stay in torch's own pool, pinned, until that is emptied too.
            dropped.clear()
            del buffer
            self._streams.unpin_cached()
