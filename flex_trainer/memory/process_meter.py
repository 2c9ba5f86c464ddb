"""Memory of this process, for models on the CPU. See `meter.py` for the words."""

from __future__ import annotations

import os
import resource
import threading
import time
import weakref
from collections.abc import Callable

import psutil

from flex_trainer.config import AUTO_LIMIT_SHARE
from flex_trainer.memory.meter import SAMPLE_SECONDS
from flex_trainer.memory.process import cgroup_free_bytes, cgroup_limit_bytes, process_memory
from flex_trainer.ranks import num_ranks_here


class ProcessMeter:
    """Memory of this process, for models on the CPU."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = _open_statm()
        self._window_high_water = 0
        self._window_peak = 0
        self._next_sample = 0.0
        self._sampler = _Sampler(self.sample)

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
        return self._read()[0]

    def left_bytes(self, limit_bytes: int) -> int:
        return min([limit_bytes - self.in_use_bytes(), *self._data_limit_left()])

    def start_window(self) -> None:
        self._window_high_water = process_memory().peak_rss_bytes
        self._window_peak = self.in_use_bytes()
        self._sampler.resume()

    def end_window(self) -> None:
        self._sampler.pause()

    def sample(self) -> None:
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._note()

    def peak_bytes(self) -> int:
        self._note()
        high_water = process_memory().peak_rss_bytes
        return high_water if high_water > self._window_high_water else self._window_peak

    def is_peak_exact(self) -> bool:
        return True  # a thread samples all the time, whatever operators do

    def now(self) -> dict[str, int]:
        return {"process": self.in_use_bytes()}

    def shortage(self, wanted_bytes: int = 0) -> str:
        return ""

    def _note(self) -> None:
        self._window_peak = max(self._window_peak, self.in_use_bytes())

    def _data_limit_left(self) -> list[int]:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return [] if limit == resource.RLIM_INFINITY else [limit - self._read()[1]]

    def _read(self) -> tuple[int, int]:
        """Resident and data bytes."""
        if self._statm is None:
            rss = psutil.Process().memory_info().rss
            return rss, rss
        fields = os.pread(self._statm, 256, 0).split()
        return int(fields[1]) * self._page_bytes, int(fields[5]) * self._page_bytes

    def __del__(self) -> None:
        self._sampler.resume()  # wakes the thread, which then ends
        if self._statm is not None:
            os.close(self._statm)


class _Sampler:
    """Calls a function every few milliseconds while a window is open, to see what operators need while they run."""

    _INTERVAL_SECONDS = 0.003

    def __init__(self, sample: Callable[[], None]) -> None:
        self._sample = weakref.WeakMethod(sample)
        self._is_open = threading.Event()
        threading.Thread(target=self._run, name="flex-memory", daemon=True).start()

    def resume(self) -> None:
        self._is_open.set()

    def pause(self) -> None:
        self._is_open.clear()

    def _run(self) -> None:
        while True:
            self._is_open.wait()
            sample = self._sample()
            if sample is None:  # the meter is gone
                return
            sample()
            del sample
            time.sleep(self._INTERVAL_SECONDS)


def _open_statm() -> int | None:
    path = "/proc/self/statm"
    return os.open(path, os.O_RDONLY) if os.path.exists(path) else None
