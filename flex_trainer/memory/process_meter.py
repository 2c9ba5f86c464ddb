"""Memory of this process, for models on the CPU. See `meter.py` for the words."""

from __future__ import annotations

import os
import queue
import resource
import threading
import time
import weakref
from pathlib import Path

import psutil

from flex_trainer.config import AUTO_LIMIT_SHARE
from flex_trainer.memory.meter import SAMPLE_SECONDS
from flex_trainer.memory.process import cgroup_free_bytes, cgroup_limit_bytes, process_memory
from flex_trainer.ranks import num_ranks_here

_STATM = Path("/proc/self/statm")


class ProcessMeter:
    """Memory of this process, for models on the CPU.

    In a forked child it measures the child: a window opened before the fork is the parent's.
    """

    def __init__(self) -> None:
        self._window_high_water = 0
        self._next_sample = 0.0
        self._sampler = _Sampler.of(self)

    def auto_bytes(self) -> int:
        """The ranks on this machine share what is free, and each asks at about the same time."""
        in_use = self.in_use_bytes()
        free = min([psutil.virtual_memory().available, *cgroup_free_bytes()]) // num_ranks_here()
        return in_use + int(AUTO_LIMIT_SHARE * max(min([free, *self._data_limit_left()]), 0))

    def device_bytes(self) -> int:
        """Of several ranks on this machine, each has an equal part."""
        whole = min(limit for limit in (psutil.virtual_memory().total, cgroup_limit_bytes()) if limit is not None)
        return whole // num_ranks_here()

    def in_use_bytes(self) -> int:
        return self._here.memory.read()[0]

    def left_bytes(self, limit_bytes: int) -> int:
        return min([limit_bytes - self.in_use_bytes(), *self._data_limit_left()])

    def start_window(self) -> None:
        self._window_high_water = process_memory().peak_rss_bytes
        self._here.open()

    def end_window(self) -> None:
        self._here.pause()

    def sample(self) -> None:
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._here.note()

    def peak_bytes(self) -> int:
        window_peak = self._here.note()
        high_water = process_memory().peak_rss_bytes
        return high_water if high_water > self._window_high_water else window_peak

    def is_peak_exact(self) -> bool:
        return True  # a thread samples all the time, whatever operators do

    def now(self) -> dict[str, int]:
        return {"process": self.in_use_bytes()}

    def shortage(self, wanted_bytes: int = 0) -> str:
        return ""

    def _data_limit_left(self) -> list[int]:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return [] if limit == resource.RLIM_INFINITY else [limit - self._here.memory.read()[1]]

    @property
    def _here(self) -> _Sampler:
        """The sampler of this process. A fork leaves the thread behind, an open file of the parent's memory, and a lock
        that the thread may have held: a child begins anew."""
        if self._sampler.pid != os.getpid():
            self._sampler = _Sampler.of(self)
        return self._sampler


class _Memory:
    """Resident and data bytes of the process in which it was made."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        # A file object and not a number: it is closed when it can no longer be read, and only then.
        self._statm = _STATM.open("rb", buffering=0) if _STATM.exists() else None

    def read(self) -> tuple[int, int]:
        if self._statm is None:
            rss = psutil.Process().memory_info().rss
            return rss, rss
        fields = os.pread(self._statm.fileno(), 256, 0).split()
        return int(fields[1]) * self._page_bytes, int(fields[5]) * self._page_bytes


class _Sampler:
    """The peak of a window, and a thread that looks at memory while one is open, to see what operators need while they
    run: every 3 milliseconds at first, and in long windows about a hundred times, since each look takes a little of a
    core and of the interpreter's lock (see `_interval`).

    The thread and the meter share this object, so that the file it reads lives as long as either. The thread ends when
    the meter is gone. It is told so by a finalizer, which may run anywhere, also inside of code that holds a lock: a
    SimpleQueue is made for that.
    """

    _SHORTEST_SECONDS, _LONGEST_SECONDS = 0.003, 0.05
    _SHARE_OF_WINDOW = 0.01
    _SHARE_OF_ELAPSED = 0.05
    _LEAST_COSTS = 50
    """A look may take at most one part in so many of a core."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.memory = _Memory()
        self._lock = threading.Lock()
        self._peak_bytes = 0
        self._orders: queue.SimpleQueue[bool | None] = queue.SimpleQueue()  # open, pause; None: end
        self._has_thread = False
        self._opened_at: float | None = None
        self._window_seconds = 0.0
        """Length of the last window."""

    @classmethod
    def of(cls, meter: ProcessMeter) -> _Sampler:
        """A sampler whose thread ends with `meter`."""
        sampler = cls()
        weakref.finalize(meter, sampler._orders.put, None)
        return sampler

    def open(self) -> None:
        """Begin a window: its peak is what is in use now."""
        with self._lock:  # a reading taken before does not end up in this window
            self._peak_bytes = self.memory.read()[0]
        if self._opened_at is None:
            self._opened_at = time.monotonic()
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._run, name="flex-memory", daemon=True).start()
        self._orders.put(True)

    def pause(self) -> None:
        if self._opened_at is not None:
            self._window_seconds, self._opened_at = time.monotonic() - self._opened_at, None
        self._orders.put(False)

    def note(self) -> int:
        """Look now; returns the peak of the window."""
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, self.memory.read()[0])
            return self._peak_bytes

    def _interval(self, cost_seconds: float) -> float:
        """Seconds until the next look: a share of what the last window took, and less in the beginning of one, which
        may be shorter.

        Args:
            cost_seconds: what the last look took.
        """
        opened_at = self._opened_at
        elapsed_seconds = 0.0 if opened_at is None else time.monotonic() - opened_at
        share_seconds = min(self._SHARE_OF_WINDOW * self._window_seconds, self._SHARE_OF_ELAPSED * elapsed_seconds)
        wanted_seconds = max(self._SHORTEST_SECONDS, share_seconds, self._LEAST_COSTS * cost_seconds)
        return min(wanted_seconds, self._LONGEST_SECONDS)

    def _run(self) -> None:
        is_open: bool | None = False
        cost_seconds = 0.0
        while is_open is not None:
            try:
                is_open = self._orders.get(timeout=self._interval(cost_seconds)) if is_open else self._orders.get()
            except queue.Empty:
                started = time.thread_time()
                self.note()
                cost_seconds = time.thread_time() - started
