"""A real cap on the memory of this process, and freed tensors given back to the system so that the cap means something.

    return_freed_memory()
    with process_limit(parse_bytes("1.4GiB")):
        train()                       # torch raises "can't allocate memory" where the process would pass the limit

Linux alone can cap.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flex_trainer.errors import UserError
from flex_trainer.memory.process import process_memory
from flex_trainer.units import format_bytes

if sys.platform != "win32":
    import resource

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's option numbers (malloc.h)."""
MMAP_THRESHOLD_BYTES = 131072
"""Its documented default, from which it adapts."""
_ADAPTED_MMAP_BYTES = 32 * 2**20 if sys.maxsize > 2**32 else 512 * 2**10
"""What it adapts to at most (DEFAULT_MMAP_THRESHOLD_MAX), once a block as large was freed."""
_ENVIRONMENT = {M_TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_", M_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_"}
_TUNABLES = {M_TRIM_THRESHOLD: "glibc.malloc.trim_threshold", M_MMAP_THRESHOLD: "glibc.malloc.mmap_threshold"}


class _Wishes:
    """Who wants freed memory returned now: malloc's options are those of the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_holders = 0
        self.is_for_good = False


_WISHES = _Wishes()


def return_freed_memory() -> bool:
    """Make freed tensors go back to the system, so that resident memory follows what is allocated.

    glibc serves large blocks by `mmap` and unmaps them when freed, but each such free raises its threshold, up to
    32 MiB; smaller blocks then come from the heap, which gives memory back only from its top. Setting the threshold
    turns that adaptation off (mallopt(3)), and what the heap holds free is trimmed now. It costs page faults: each new
    tensor over 128 KiB is zeroed by the kernel again.

    For the rest of the process's life; `hold_memory_returned` is the same for a while.

    Returns:
        True when set; False on systems without glibc, where nothing is changed.
    """
    with _WISHES.lock:
        _WISHES.is_for_good = True
        return _set_returning()


def hold_memory_returned() -> Callable[[], None]:
    """`return_freed_memory`, until the function that is returned is called; of several, the last one counts.

    glibc cannot be told to adapt its threshold again: setting any of these options turns that off for good. So what is
    put back is what adaptation ends at in a process that frees large tensors, 32 MiB (and twice that for the trimming
    of the heap's top), or what the environment has set: MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, or the
    GLIBC_TUNABLES of these names. After `return_freed_memory` nothing is put back.
    """
    with _WISHES.lock:
        _WISHES.num_holders += 1
        _set_returning()
    is_held = True

    def let_go() -> None:
        nonlocal is_held
        with _WISHES.lock:
            if not is_held:
                return
            is_held = False
            _WISHES.num_holders -= 1
            if _WISHES.num_holders == 0 and not _WISHES.is_for_good:
                _set_adapted()

    return let_go


def trim_freed_memory() -> None:
    """Give the system what the heap holds free now; malloc's options stay as they are. Nothing without glibc."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _set_returning() -> bool:
    is_set = _has_glibc() and _set_option(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    trim_freed_memory()
    return is_set


def _set_adapted() -> None:
    if _has_glibc():
        mmap_bytes = _wish_of_environment(M_MMAP_THRESHOLD)
        _set_option(M_MMAP_THRESHOLD, _ADAPTED_MMAP_BYTES if mmap_bytes is None else mmap_bytes)
        trim_bytes = _wish_of_environment(M_TRIM_THRESHOLD)
        _set_option(M_TRIM_THRESHOLD, 2 * _ADAPTED_MMAP_BYTES if trim_bytes is None else trim_bytes)


def _wish_of_environment(option: int) -> int | None:
    """What the process was started with, in bytes. A tunable wins over the older variable, as in glibc."""
    tunables = dict(part.split("=", 1) for part in os.environ.get("GLIBC_TUNABLES", "").split(":") if "=" in part)
    for text in (tunables.get(_TUNABLES[option]), os.environ.get(_ENVIRONMENT[option])):
        if text is not None and text.isdecimal():  # glibc does not take other text either
            return int(text)
    return None


def _set_option(option: int, value: int) -> bool:
    return ctypes.CDLL(None).mallopt(ctypes.c_int(option), ctypes.c_int(min(value, 2**31 - 1))) == 1


@functools.cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


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
