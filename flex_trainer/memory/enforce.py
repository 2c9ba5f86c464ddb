"""A real cap on the memory of this process, and freed tensors given back to the system so that the cap means something.

    return_freed_memory()
    with process_limit(parse_bytes("1.4GiB")):
        train()                       # torch raises "can't allocate memory" where the process would pass the limit

Linux alone can cap.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flex_trainer.errors import UserError
from flex_trainer.memory.process import process_memory
from flex_trainer.units import format_bytes

if sys.platform != "win32":
    import resource

M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 131072
"""glibc's option number (malloc.h) and its documented default value."""


def trim_freed_memory() -> None:
    """Give what malloc holds free back to the system now; nothing is changed for later. Without glibc: nothing."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def return_freed_memory() -> bool:
    """Make freed tensors go back to the system, so that resident memory follows what is allocated.

    glibc serves large blocks by `mmap` and unmaps them when freed, but each such free raises its threshold, up to
    32 MiB; smaller blocks then come from the heap, which gives memory back only from its top. Setting the threshold
    turns that adaptation off (mallopt(3)), and what the heap holds free is trimmed now. It costs page faults: each new
    tensor over 128 KiB is zeroed by the kernel again. glibc has no way to take the adaptation up again, so this holds
    for the rest of the process.

    Returns:
        True when set; False on systems without glibc, where nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    is_set = libc.mallopt(ctypes.c_int(M_MMAP_THRESHOLD), ctypes.c_int(MMAP_THRESHOLD_BYTES)) == 1
    trim_freed_memory()
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
