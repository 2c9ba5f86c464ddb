"""torch.cuda's readings without a GPU: numbers that a test sets, behind the functions that the meter asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

GIB = 2**30


@dataclass
class FakeCuda:
    """The allocator's and the driver's numbers of device 1, in bytes."""

    allocated: int = 10 * GIB
    requested: int = 10 * GIB
    active: int = 10 * GIB
    reserved: int = 12 * GIB
    split: int = 0
    peak: int = 11 * GIB
    free: int = 60 * GIB
    total: int = 80 * GIB
    fraction: float = 1.0
    retries: int = 0
    settings: str = ""
    backend: str = "native"
    is_capturing: bool = False
    snapshot: list[dict[str, Any]] = field(default_factory=list)
    num_reads: int = 0

    def stats(self, device: torch.device) -> dict[str, Any]:
        assert device == torch.device("cuda", 1)
        self.num_reads += 1
        self.peak = max(self.peak, self.allocated)
        named = {
            "allocated_bytes": {"current": self.allocated, "peak": self.peak},
            "requested_bytes": {"current": self.requested},
            "active_bytes": {"current": self.active},
            "reserved_bytes": {"current": self.reserved},
            "inactive_split_bytes": {"current": self.split},
        }
        return {"num_alloc_retries": self.retries, **{name: {"all": value} for name, value in named.items()}}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        for name, function in {
            "memory_stats_as_nested_dict": self.stats,
            "mem_get_info": lambda device: (self.free, self.total),
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "get_allocator_backend": lambda: self.backend,
            "is_current_stream_capturing": lambda: self.is_capturing,
            "memory_snapshot": lambda: self.snapshot,
            "current_device": lambda: 1,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: self.settings)
        return self


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)
