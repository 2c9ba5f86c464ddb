"""The memory of this process: how much it uses, and a real cap on it.

    return_freed_memory()
    with process_limit(parse_bytes("1.4GiB")):
        train()                       # torch raises "can't allocate memory" where the process would pass the limit

Linux alone can cap. What the numbers mean there:

- *resident* bytes (VmRSS) are pages that the process has touched and that are in memory. They include pages of files,
  such as the code of torch's libraries, and leave out what was allocated and never written.
- *data* bytes (VmData) are private writable mappings: heap, anonymous memory and thread stacks, touched or not. This is
  what RLIMIT_DATA limits, at the moment of allocation, so that an allocation over the limit fails as on a full machine.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from flex_trainer.errors import UserError
from flex_trainer.units import format_bytes

if sys.platform != "win32":
    import resource

M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 131072
"""glibc's option number (malloc.h) and its documented default value."""


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT_BYTES = 2**60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True)
class ProcessMemory:
    """One reading of this process's memory, in bytes."""

    rss_bytes: int
    """In memory now."""
    peak_rss_bytes: int
    """Highest `rss_bytes` since the process started, or since `reset_peak_rss`. Outside Linux, only the current value
    where the system keeps no peak."""
    data_bytes: int | None
    """Private writable mappings, touched or not; None outside Linux."""


def process_memory() -> ProcessMemory:
    """Read the memory of this process from `/proc/self/status` (Linux), from psutil elsewhere.

    The kernel adds up page counts per CPU, so a reading can be off by a few hundred KiB.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = (line.split() for line in status.read_text().splitlines() if line.startswith("Vm"))
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return ProcessMemory(sizes["VmRSS"], sizes["VmHWM"], sizes["VmData"])
    info = psutil.Process().memory_info()
    return ProcessMemory(info.rss, max(info.rss, getattr(info, "peak_wset", 0)), None)


def reset_peak_rss() -> bool:
    """Start the resident peak anew from what is in use now, as `torch.cuda.reset_peak_memory_stats` does on a GPU.

    Returns:
        Whether the system can: Linux only, and only where the process may write `/proc/self/clear_refs`.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def cgroup_limit_bytes() -> int | None:
    """The memory limit of this process's container or service; None without one."""
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file():
            text = path.read_text().strip()
            if text != "max" and int(text) < _NO_LIMIT_BYTES:
                return int(text)
    return None


def cgroup_used_bytes() -> int | None:
    """What this process's control group (version 2) uses now; None where it does not say."""
    path = Path("/sys/fs/cgroup/memory.current")
    return int(path.read_text()) if path.is_file() else None


def return_freed_memory() -> bool:
    """Make freed tensors go back to the system, so that resident memory follows what is allocated.

    glibc serves large blocks by `mmap` and unmaps them when freed, but each such free raises its threshold, up to
    32 MiB; smaller blocks then come from the heap, which gives memory back only from its top. Setting the threshold
    turns that adaptation off (mallopt(3)), and what the heap holds free is trimmed now. It costs page faults: each new
    tensor over 128 KiB is zeroed by the kernel again.

    Returns:
        True when set; False on systems without glibc, where nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    is_set = libc.mallopt(ctypes.c_int(M_MMAP_THRESHOLD), ctypes.c_int(MMAP_THRESHOLD_BYTES)) == 1
    libc.malloc_trim(ctypes.c_size_t(0))
    return is_set


def enforce_process_limit(limit_bytes: int) -> int:
    """Cap this process's resident memory at `limit_bytes` for the rest of its life; allocations beyond it fail.

    Call it when the model is built and the libraries are warm. See `process_limit` for how exact the cap is, and for
    the errors.

    Returns:
        The value given to RLIMIT_DATA, in bytes.
    """
    data_limit_bytes = _data_limit_bytes(limit_bytes)
    _set_data_limit(data_limit_bytes, data_limit_bytes)
    return data_limit_bytes


@contextmanager
def process_limit(limit_bytes: int) -> Iterator[int]:
    """Cap this process's resident memory at `limit_bytes` inside the `with` block; allocations beyond it fail.

    Resident memory cannot be limited as such, so what it may still grow by is granted to the data bytes:

        RLIMIT_DATA = data bytes now + (limit_bytes - resident bytes now)

    How exact that is was measured with torch 2.13 on Linux 6.18 (x86-64, 2 threads), by allocating tensors of 64 KiB to
    16 MiB, and by training on ever longer batches, until an allocation failed, under limits of 0.5 to 1.2 GiB. The
    resident peak ended at most 8 MiB above the limit: pages of files read later, which the data bytes do not count.
    It ended at most 12 MiB, or the size of the tensor that did not fit, below it: memory allocated and not written,
    such as the stacks of threads started later (8 MiB each by default). So call `return_freed_memory` and run one
    step first.

    Raises:
        ValueError: a limit at or below what is resident now, or above what an earlier hard limit allows.
        RuntimeError: outside Linux, whose RLIMIT_DATA alone covers all that malloc and torch allocate.
    """
    data_limit_bytes = _data_limit_bytes(limit_bytes)
    earlier = resource.getrlimit(resource.RLIMIT_DATA)
    _set_data_limit(data_limit_bytes, earlier[1])
    try:
        yield data_limit_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, earlier)


def _data_limit_bytes(limit_bytes: int) -> int:
    memory = process_memory()
    if memory.data_bytes is None or not sys.platform.startswith("linux"):
        raise RuntimeError(f"a limit on process memory needs Linux; this is {sys.platform}")
    if limit_bytes <= memory.rss_bytes:
        raise UserError(
            f"a process limit of {format_bytes(limit_bytes)} ({limit_bytes} bytes) must be above the "
            f"{format_bytes(memory.rss_bytes)} this process uses already; raise the limit or use a smaller model"
        )
    return memory.data_bytes + limit_bytes - memory.rss_bytes


def _set_data_limit(soft_bytes: int, hard_bytes: int) -> None:
    allowed_bytes = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if allowed_bytes != resource.RLIM_INFINITY and soft_bytes > allowed_bytes:
        raise UserError(
            f"the process limit needs {format_bytes(soft_bytes)} of data memory, and the hard limit of this process "
            f"allows {format_bytes(allowed_bytes)}; lower the process limit, or raise the hard limit (ulimit -H -d)"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, hard_bytes))
