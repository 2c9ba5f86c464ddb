"""Memory in use, on the device that holds the activations, each kind under its own name.

CPU    *process*: resident memory of this process. Where a hard limit on the process's data (RLIMIT_DATA) is nearer than
       the memory limit, that one counts.
CUDA   *allocated*: bytes in torch's tensors; *reserved*: what torch's allocator holds; *device*: what all processes use
       of the card. Plans are made in allocated bytes. See `allocator.py` for what lies between the three.

Shared counters (CUDA's peak, the kernel's high-water mark) are read, never reset: they may belong to somebody else's
measurement. A peak inside a window is therefore the counter's value where it rose in the window, else the highest
sample.
"""

from __future__ import annotations

import os
import resource
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import psutil
import torch

from flex_trainer.allocator import (
    EXPANDABLE_SEGMENTS_ADVICE,
    has_expandable_segments,
    largest_free_block,
    read_allocator,
    with_index,
)
from flex_trainer.config import AUTO_LIMIT_SHARE, FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.process_memory import cgroup_limit_bytes, cgroup_used_bytes, process_memory
from flex_trainer.ranks import num_ranks_here
from flex_trainer.units import format_bytes


class MemoryMeter(Protocol):
    """Reads memory in use. A window spans one micro-batch; samples inside it are cheap."""

    def auto_bytes(self) -> int:
        """What "auto" takes as the limit: all that this process may use of the device."""
        ...

    def device_bytes(self) -> int:
        """All memory of the device (CPU: of the machine or the control group, whichever is less, over its ranks)."""
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

    def shortage(self, wanted_bytes: int = 0) -> str:
        """Why an allocation of `wanted_bytes` (0: unknown) has just failed, as the device's allocator knows; "" where
        it knows nothing."""
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


_SAMPLE_SECONDS = 0.001
"""Samples come at least this far apart: operators may follow one another every few microseconds."""
_CUDA_SAMPLE_SHARE = 0.01
"""On CUDA they never take more than this share of the host's time."""
_LEAST_ROUNDED_BYTES = 2**24
_MOST_ROUNDING = 1.25
"""Rounding is learnt from windows that allocate this much, and believed up to here."""


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
            self._next_sample = now + _SAMPLE_SECONDS
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


class CudaMeter:
    """Memory of one CUDA device, in allocated bytes (sizes as the allocator rounds them).

    The windows are those of the runtime: from the first forward of the micro-batches in flight to the end of their
    last backward. Statistics follow the host's order of allocations, so nothing here waits for the device.

    Raises:
        ValueError: the forward is being captured into a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(device)
        self._window_counter = 0
        self._window_start = _Sizes(0, 0)
        self._window_peak = _Sizes(0, 0)
        self._window_retries = 0
        self._next_sample = 0.0
        self._rounding = 1.0
        self._has_advised = False

    def auto_bytes(self) -> int:
        state = read_allocator(self._device)
        return state.reserved_bytes + int(AUTO_LIMIT_SHARE * state.growth_bytes)

    def device_bytes(self) -> int:
        return torch.cuda.get_device_properties(self._device).total_memory

    def in_use_bytes(self) -> int:
        return self._read()[0].allocated_bytes

    def left_bytes(self, limit_bytes: int) -> int:
        """Under the limit, under what other processes leave, under a memory fraction; less what is lost to
        fragmentation, and less what rounding added to the activations of the last window."""
        state = read_allocator(self._device)
        left_bytes = min(limit_bytes - state.allocated_bytes, state.usable_bytes)
        return int(left_bytes / self._rounding) if left_bytes > 0 else left_bytes

    def start_window(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UserError(
                "FlexTrainer cannot manage a forward that is captured into a CUDA graph: its decisions and copies "
                "change from one micro-batch to the next. Train without CUDA graphs, or detach before the capture."
            )
        sizes, self._window_counter, self._window_retries = self._read()
        self._window_start = self._window_peak = sizes

    def end_window(self) -> None:
        self._learn_rounding()
        if self._read()[2] > self._window_retries:
            self._advise()

    def sample(self) -> None:
        started = time.monotonic()
        if started >= self._next_sample:
            self._note(self._read()[0])
            ended = time.monotonic()
            self._next_sample = ended + max(_SAMPLE_SECONDS, (ended - started) / _CUDA_SAMPLE_SHARE)

    def peak_bytes(self) -> int:
        sizes, counter, _ = self._read()
        self._note(sizes)
        return counter if counter > self._window_counter else self._window_peak.allocated_bytes

    def is_peak_exact(self) -> bool:
        return self._read()[1] > self._window_counter

    def now(self) -> dict[str, int]:
        state = read_allocator(self._device)
        return {
            "allocated": state.allocated_bytes,
            "reserved": state.reserved_bytes,
            "device": state.total_bytes - state.free_bytes,
        }

    def shortage(self, wanted_bytes: int = 0) -> str:
        """Whether the device is full or its memory in pieces, for the message of a failed allocation."""
        return read_allocator(self._device).shortage(wanted_bytes, largest_free_block(self._device))

    def _read(self) -> tuple[_Sizes, int, int]:
        """Sizes now, the counter of the most ever allocated, and the number of retries."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        requested_bytes = stats["requested_bytes"]["all"]["current"] if "requested_bytes" in stats else 0
        return _Sizes(allocated["current"], requested_bytes), allocated["peak"], stats["num_alloc_retries"]

    def _note(self, sizes: _Sizes) -> None:
        if sizes.allocated_bytes > self._window_peak.allocated_bytes:
            self._window_peak = sizes

    def _learn_rounding(self) -> None:
        """What the allocator took for this window's activations, over what was asked for: blocks come in steps of 512
        bytes, and large ones keep a rest of up to 1 MiB."""
        allocated_bytes = self._window_peak.allocated_bytes - self._window_start.allocated_bytes
        requested_bytes = self._window_peak.requested_bytes - self._window_start.requested_bytes
        if requested_bytes >= _LEAST_ROUNDED_BYTES:
            self._rounding = min(max(allocated_bytes / requested_bytes, 1.0), _MOST_ROUNDING)

    def _advise(self) -> None:
        """Segments were refused in this window: say once if that was because of fragmentation."""
        state = read_allocator(self._device)
        if self._has_advised or not state.is_fragmented or has_expandable_segments():
            return
        if torch.cuda.get_allocator_backend() != "native":
            return
        self._has_advised = True
        warnings.warn(
            f"memory of {self._device} is fragmented: {format_bytes(state.split_bytes)} of "
            f"{format_bytes(state.reserved_bytes)} reserved bytes lie free between blocks in use; "
            f"{EXPANDABLE_SEGMENTS_ADVICE}.",
            stacklevel=2,
        )


class _Sizes(NamedTuple):
    """Bytes in torch's tensors: as rounded by the allocator, and as asked for."""

    allocated_bytes: int
    requested_bytes: int


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


def cgroup_free_bytes() -> list[int]:
    """What the control group (version 2) still allows, if it is limited at all."""
    limit_bytes, used_bytes = cgroup_limit_bytes(), cgroup_used_bytes()
    return [] if limit_bytes is None or used_bytes is None else [limit_bytes - used_bytes]
