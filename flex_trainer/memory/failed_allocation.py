"""Allocations that fail: telling them from other errors, and saying how much was asked for and who refused.

The only place that knows what such errors look like.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from dataclasses import dataclass

import psutil
import torch

from flex_trainer.memory.allocator import read_allocator, with_index
from flex_trainer.memory.process import cgroup_limit_bytes, cgroup_used_bytes, process_memory
from flex_trainer.units import format_bytes

if sys.platform != "win32":
    import resource

_MESSAGES = (
    "can't allocate memory: you tried to allocate",  # torch's CPU allocator, with posix_memalign
    "not enough memory: you tried to allocate",  # the same, elsewhere
    "std::bad_alloc",
    "can't start new thread",  # Python: no room for its stack, or, rarely, too many threads
    "unable to mmap",  # torch's shared memory; only together with the system's reason, see below
    "CUDA error: out of memory",  # pinned memory, streams and contexts: not from torch's caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What a RuntimeError says when memory is the reason."""
_NO_MEMORY = "Cannot allocate memory"  # strerror(ENOMEM)
_REQUEST = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGTP]iB|B)\b")
_UNIT_BYTES = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a device, in torch's CPU allocator, in Python, or in the system."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    found = next((message for message in _MESSAGES if message in text), None)
    return found is not None and (found != "unable to mmap" or _NO_MEMORY in text)


def requested_bytes(error: BaseException) -> int:
    """Bytes that the failed allocation asked for; 0 when the error does not tell."""
    match = _REQUEST.search(str(error))
    return int(float(match[1]) * _UNIT_BYTES[match[2]]) if match else 0


def let_go(error: BaseException) -> None:
    """Drop the local variables of the frames that an error passed through: they hold the tensors of the failed run.

    Frames that still run are left alone. So are the errors this one came from left without theirs.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        chain += [one.__context__, one.__cause__]
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None


@dataclass(frozen=True)
class Limit:
    """Something that bounds the memory of this process."""

    name: str
    num_bytes: int
    left_bytes: int

    def __str__(self) -> str:
        return f"{self.name} of {format_bytes(self.num_bytes)} ({format_bytes(max(self.left_bytes, 0))} left)"


def nearest_limit(device: torch.device) -> Limit:
    """What an allocation on `device` runs into first: the data limit of the process, its control group, or all there
    is."""
    if device.type == "cuda":
        state = read_allocator(with_index(device))
        return Limit("the memory of the device", state.allowed_bytes, state.usable_bytes)
    memory = psutil.virtual_memory()
    limits = [Limit("the memory of the machine", memory.total, memory.available)]
    group_bytes, used_bytes = cgroup_limit_bytes(), cgroup_used_bytes()
    if group_bytes is not None and used_bytes is not None:
        limits.append(Limit("the memory limit of the control group", group_bytes, group_bytes - used_bytes))
    data_bytes = process_memory().data_bytes
    if sys.platform != "win32" and data_bytes is not None:
        limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            limits.append(Limit("the data limit of the process (RLIMIT_DATA)", limit_bytes, limit_bytes - data_bytes))
    return min(limits, key=lambda limit: limit.left_bytes)
