"""The memory of this process, read from the system. What the numbers mean on Linux:

- *resident* bytes (VmRSS) are pages that the process has touched and that are in memory. They include pages of files,
  such as the code of torch's libraries, and leave out what was allocated and never written.
- *data* bytes (VmData) are private writable mappings: heap, anonymous memory and thread stacks, touched or not. This is
  what RLIMIT_DATA limits, at the moment of allocation, so that an allocation over the limit fails as on a full machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

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


def cgroup_free_bytes() -> list[int]:
    """What the control group (version 2) still allows, if it is limited at all."""
    limit_bytes, used_bytes = cgroup_limit_bytes(), cgroup_used_bytes()
    return [] if limit_bytes is None or used_bytes is None else [limit_bytes - used_bytes]
