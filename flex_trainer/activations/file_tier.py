"""The lower tier of a CPU device: one unnamed file, written and read by a worker thread.

Plain positioned reads and writes, not a memory map: mapped pages would count as the process's own resident memory, and
what is offloaded must not.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from flex_trainer.activations.ledger import CopyTime
from flex_trainer.errors import UserError
from flex_trainer.units import format_bytes

_ALIGNMENT_BYTES = 4096


class _Job:
    """A copy on its way, as a future."""

    def __init__(self, future: Future[CopyTime]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def release(self) -> None:
        self.wait()

    def time(self) -> CopyTime | None:
        is_made = self._future.done() and self._future.exception() is None
        return self._future.result() if is_made else None


class FileTier:
    """Keeps offloaded storages in a temporary file of `directory` (the system's own when None).

    The file has no name: nothing is left behind, however the process ends.

    Raises:
        ValueError: the directory does not exist or cannot be written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = Path(tempfile.gettempdir()) if directory is None else directory
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - open as long as the tier
        except OSError as error:
            raise UserError(
                f"offload_to={str(self._directory)!r} cannot be used ({error.strerror}); give a directory that exists "
                "and that this user may write to, or 'host'"
            ) from error
        weakref.finalize(self, self._file.close)  # copies on their way keep the tier alive
        self._free: list[tuple[int, int]] = []  # (offset, bytes), sorted, never adjacent
        # A value may die inside any allocation, also one of ours: freeing only notes the place.
        self._freed: deque[tuple[int, int]] = deque()
        self._end = 0
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="flex-offload")

    def write(self, source: torch.Tensor) -> tuple[tuple[int, int], _Job]:
        place = self._allocate(source.numel())
        return place, _Job(self._workers.submit(_timed, self._write, place[0], source))

    def read(self, place: tuple[int, int], target: torch.Tensor) -> _Job:
        return _Job(self._workers.submit(_timed, self._read, place[0], target))

    def free(self, place: tuple[int, int]) -> None:
        self._freed.append(place)

    def describe(self) -> str:
        return f"{self._directory} ({format_bytes(self._end)} in use)"

    def _allocate(self, num_bytes: int) -> tuple[int, int]:
        """First fit, in whole pages."""
        num_bytes = -(-max(num_bytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        with self._lock:
            self._merge_freed()
            for index, (offset, free_bytes) in enumerate(self._free):
                if free_bytes >= num_bytes:
                    rest = free_bytes - num_bytes
                    self._free[index : index + 1] = [(offset + num_bytes, rest)] if rest else []
                    return offset, num_bytes
            offset = self._end
            self._end += num_bytes
            return offset, num_bytes

    def _merge_freed(self) -> None:
        places = self._free
        while self._freed:
            places.append(self._freed.popleft())
        places.sort()
        self._free = []
        for offset, num_bytes in places:
            if self._free and sum(self._free[-1]) == offset:
                self._free[-1] = (self._free[-1][0], self._free[-1][1] + num_bytes)
            else:
                self._free.append((offset, num_bytes))

    def _write(self, offset: int, source: torch.Tensor) -> None:
        view = memoryview(source.numpy().data)
        while view:
            written = os.pwrite(self._file.fileno(), view[: 2**30], offset)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            view, offset = view[written:], offset + written

    def _read(self, offset: int, target: torch.Tensor) -> None:
        view = memoryview(target.numpy().data)
        while view:
            num_read = os.preadv(self._file.fileno(), [view[: 2**30]], offset)
            if num_read == 0:
                raise OSError(errno.EIO, "the offload file is shorter than what was written to it")
            view, offset = view[num_read:], offset + num_read


def _timed(copy: Callable[[int, torch.Tensor], None], offset: int, memory: torch.Tensor) -> CopyTime:
    start, start_on_core = time.perf_counter(), time.thread_time()
    copy(offset, memory)
    core_seconds = time.thread_time() - start_on_core
    return CopyTime(memory.numel(), time.perf_counter() - start, core_seconds)
