"""Memory in use, on the device that holds the activations, each kind under its own name.

CPU    *process*: resident memory of this process. Where a hard limit on the process's data (RLIMIT_DATA) is nearer than
       the memory limit, that one counts.
CUDA   *allocated*: bytes in torch's tensors; *reserved*: what torch's allocator holds; *device*: what all processes use
       of the card. Plans are made in allocated bytes.

Shared counters (CUDA's peak, the kernel's high-water mark) are read, never reset: they may belong to somebody else's
measurement. A peak inside a window is therefore the counter's value where it rose in the window, else the highest
sample.
"""

from __future__ import annotations

import os
import resource
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
import torch

from flex_trainer.compat import cuda_allocated_bytes
from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.process_memory import cgroup_limit_bytes, process_memory


class MemoryMeter(Protocol):
    """Reads memory in use. A window spans one micro-batch; samples inside it are cheap."""

    def auto_bytes(self) -> int:
        """What "auto" takes as the limit: all that this process may use of the device."""
        ...

    def device_bytes(self) -> int:
        """All memory of the device (CPU: of the machine or the control group, whichever is less)."""
        ...

    def in_use_bytes(self) -> int:
        """Memory in use now, as plans count it."""
        ...

    def left_bytes(self, limit_bytes: int) -> int:
        """How much more may be used under the limit, and under any harder one."""
        ...

    def start_window(self) -> None: ...

    def end_window(self) -> None: ...

    def sample(self) -> None:
        """Note memory in use now."""
        ...

    def peak_bytes(self) -> int:
        """Highest memory in use since the window started."""
        ...

    def is_peak_exact(self) -> bool:
        """Whether the window's peak is known, and not only a lower bound."""
        ...

    def now(self) -> dict[str, int]:
        """Memory in use now, by name."""
        ...


def limit_bytes(config: FlexConfig, meter: MemoryMeter) -> int:
    """The memory limit of a config on the meter's device."""
    return config.limit_bytes(meter.device_bytes(), meter.auto_bytes())


def meter_for(device: torch.device) -> MemoryMeter:
    """The meter of a device type.

    Raises:
        ValueError: neither CPU nor CUDA.
    """
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ProcessMeter()
    raise UserError(f"FlexTrainer can measure memory on cpu and cuda devices, not on {device.type!r}")


_CUDA_SAMPLE_SECONDS = 0.001
_AUTO_SHARE = 0.9
"""Share of the free memory that "auto" takes: the rest is for what the process allocates outside of its tensors."""


class ProcessMeter:
    """Memory of this process, for models on the CPU."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = _open_statm()
        self._window_high_water = 0
        self._window_peak = 0
        self._sampler = _Sampler(self.sample)

    def auto_bytes(self) -> int:
        in_use = self.in_use_bytes()
        free = [psutil.virtual_memory().available, *_cgroup_free_bytes(), *self._data_limit_left()]
        return in_use + int(_AUTO_SHARE * max(min(free), 0))

    def device_bytes(self) -> int:
        return min(limit for limit in (psutil.virtual_memory().total, cgroup_limit_bytes()) if limit is not None)

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
        self._window_peak = max(self._window_peak, self.in_use_bytes())

    def peak_bytes(self) -> int:
        self.sample()
        high_water = process_memory().peak_rss_bytes
        return high_water if high_water > self._window_high_water else self._window_peak

    def is_peak_exact(self) -> bool:
        return True  # a thread samples all the time, whatever operators do

    def now(self) -> dict[str, int]:
        return {"process": self.in_use_bytes()}

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


class CudaMeter:
    """Memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._window_counter = 0
        self._window_peak = 0
        self._next_sample = 0.0

    def auto_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device) + int(_AUTO_SHARE * free)

    def device_bytes(self) -> int:
        return torch.cuda.get_device_properties(self._device).total_memory

    def in_use_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def left_bytes(self, limit_bytes: int) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        allocated = self.in_use_bytes()
        return min(limit_bytes - allocated, free + reserved - allocated)

    def start_window(self) -> None:
        self._window_peak, self._window_counter = cuda_allocated_bytes(self._device)

    def end_window(self) -> None:
        pass

    def sample(self) -> None:
        # Operators may follow one another every few microseconds; reading the allocator's statistics takes longer.
        if time.monotonic() >= self._next_sample:
            self._window_peak = max(self._window_peak, cuda_allocated_bytes(self._device)[0])
            self._next_sample = time.monotonic() + _CUDA_SAMPLE_SECONDS

    def peak_bytes(self) -> int:
        current, counter = cuda_allocated_bytes(self._device)
        self._window_peak = max(self._window_peak, current)
        return counter if self.is_peak_exact() else self._window_peak

    def is_peak_exact(self) -> bool:
        return cuda_allocated_bytes(self._device)[1] > self._window_counter

    def now(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "device": total - free,
        }


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


def _cgroup_free_bytes() -> list[int]:
    """What the control group (version 2) still allows, if it is limited at all."""
    limit, usage_file = cgroup_limit_bytes(), Path("/sys/fs/cgroup/memory.current")
    return [limit - int(usage_file.read_text())] if limit is not None and usage_file.exists() else []
