"""Streams and events without a GPU: work runs when a random scheduler lets it, in any order that events allow.

    device = FakeDevice(seed=0)
    with device.on(device.stream()): ...         # the stream on which "this thread computes"

A copy that was not ordered by events runs too early or too late in some schedule; then it reads what is not there yet,
or writes into memory that was given to another tensor.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

_OTHERS = 99
"""What others write into memory that was given to them."""


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a flat uint8 tensor, without keeping the tensor: only its memory stays."""
    kept = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    kept.storage = tensor.untyped_storage()  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(kept)


class FakeEvent:
    """The last point of a stream at which it was recorded."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._num_recorded = self.num_reached = 0
        self.seconds = 0.0

    def record(self, stream: FakeStream) -> None:
        self._num_recorded += 1
        number = self._num_recorded

        def reach() -> None:
            self.num_reached = number
            self.seconds = self._device.seconds

        stream.push(reach)

    @property
    def num_recorded(self) -> int:
        return self._num_recorded

    def query(self) -> bool:
        self._device.run_some()
        return self.num_reached >= self._num_recorded

    def synchronize(self) -> None:
        self._device.num_host_waits += 1
        while self.num_reached < self._num_recorded:
            self._device.run_one()

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


class FakeStream:
    """Work in order; a wait at its head holds back what is behind it."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.work: deque[tuple[FakeEvent, int] | Callable[[], None]] = deque()

    def push(self, run: Callable[[], None]) -> None:
        self.work.append(run)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append((event, event.num_recorded))

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    @property
    def can_run(self) -> bool:
        if not self.work:
            return False
        head = self.work[0]
        return not isinstance(head, tuple) or head[0].num_reached >= head[1]


class FakeDevice:
    """Streams with one scheduler, pinned memory with a bound of the system, and the seam of the pinned tier."""

    def __init__(self, seed: int, system_bytes: int = 2**40) -> None:
        self._random = random.Random(seed)
        self._streams: list[FakeStream] = []
        self.down, self.up, self.compute = self.stream("down"), self.stream("up"), self.stream("compute")
        self._current = self.compute
        self.seconds = 0.0
        self.num_host_waits = 0
        self.system_bytes = system_bytes
        self.pinned: dict[int, int] = {}
        """Bytes of the pinned buffers alive and of those cached, by address of their storage's header."""
        self.cached_bytes = 0
        self._given_away: list[np.ndarray] = []
        self._users: dict[int, list[FakeStream]] = {}

    def stream(self, name: str = "other") -> FakeStream:
        self._streams.append(FakeStream(self, name))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    # Scheduling

    def run_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.can_run]
        if not ready:
            assert not any(stream.work for stream in self._streams), "streams wait for each other"
            return False
        work = self._random.choice(ready).work.popleft()
        self.seconds += 0.001
        if not isinstance(work, tuple):
            work()
        return True

    def run_some(self) -> None:
        for _ in range(self._random.randrange(3)):
            self.run_one()

    def run_all(self) -> None:
        while self.run_one():
            pass

    # What the tier asks for

    def current(self) -> FakeStream:
        return self._current

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> FakeEvent:
        to, what = memory_of(target), memory_of(source)
        stream.push(lambda: to.__setitem__(slice(None), what))
        self._give_away(source if stream is self.down else target)
        return stream.record_event()

    def _give_away(self, tensor: torch.Tensor) -> None:
        """When the tensor is no longer held, the next kernel of the stream it belongs to may overwrite it."""
        home, numbers = self._current, memory_of(tensor)
        users = self._users[id(tensor)] = []

        def reuse() -> None:
            for user in users:
                home.wait_stream(user)
            home.push(lambda: numbers.__setitem__(slice(None), _OTHERS))
            self._given_away.append(numbers)

        weakref.finalize(tensor, reuse)

    def assert_others_are_unharmed(self) -> None:
        """No copy has written into memory after it was given to others."""
        assert all((numbers == _OTHERS).all() for numbers in self._given_away)

    def keep_for(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self._users[id(tensor)].append(stream)

    def pin(self, num_bytes: int) -> torch.Tensor:
        if sum(self.pinned.values()) + self.cached_bytes + num_bytes > self.system_bytes:
            raise RuntimeError("CUDA error: out of memory")
        memory = torch.full((num_bytes,), 255, dtype=torch.uint8)
        key = id(memory)
        self.pinned[key] = num_bytes

        def cache() -> None:  # as torch's pinned allocator: dropped buffers stay pinned
            self.cached_bytes += self.pinned.pop(key)

        weakref.finalize(memory, cache)
        return memory

    def unpin_cached(self) -> None:
        self.run_all()
        self.cached_bytes = 0
