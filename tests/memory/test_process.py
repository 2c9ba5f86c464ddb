"""Readings of process memory follow what is allocated; the cap is real, near its limit, and can be undone."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from typing import Any

import pytest
import torch

import flex_trainer.memory.enforce as enforce
from flex_trainer.memory.enforce import (
    enforce_process_limit,
    hold_memory_returned,
    process_limit,
    return_freed_memory,
)
from flex_trainer.memory.process import process_memory, reset_peak_rss
from flex_trainer.testing.processes import run_in_subprocess

MIB = 2**20
_PR_SET_THP_DISABLE = 41
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux caps all data memory")


def fill_until_refused(limit_bytes: int) -> list[torch.Tensor]:
    """Tensors of 1 MiB until torch refuses; the last allocation must be refused before twice the limit."""
    tensors = []
    with pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory"):
        while len(tensors) * MIB < 2 * limit_bytes:
            tensors.append(torch.ones(MIB // 4))
    return tensors


# Called in fresh processes by name.
def child_fills_a_limit(extra_bytes: int) -> dict[str, Any]:
    return_freed_memory()
    limit_bytes = process_memory().rss_bytes + extra_bytes
    enforce_process_limit(limit_bytes)
    num_tensors = len(fill_until_refused(limit_bytes))
    return {"limit_bytes": limit_bytes, "num_tensors": num_tensors}


def child_dies_of_a_limit(extra_bytes: int) -> None:
    enforce_process_limit(process_memory().rss_bytes + extra_bytes)
    torch.ones(4 * extra_bytes)


def child_undoes_a_limit(extra_bytes: int) -> int:
    with process_limit(process_memory().rss_bytes + extra_bytes) as data_limit_bytes:
        assert data_limit_bytes > 0
        fill_until_refused(process_memory().rss_bytes + extra_bytes)
    return torch.ones(2 * extra_bytes, dtype=torch.uint8).numel()


def child_asks_beyond_its_hard_limit(extra_bytes: int) -> None:
    enforce_process_limit(process_memory().rss_bytes + extra_bytes)
    with process_limit(process_memory().rss_bytes + 4 * extra_bytes):
        pass


def child_frees(num_bytes: int) -> dict[str, Any]:
    is_set = return_freed_memory()
    before = process_memory().rss_bytes
    # Sizes that grow: glibc would raise its threshold at each free, and keep the later ones in its heap.
    for size in (num_bytes // 8, num_bytes // 4, num_bytes):
        tensors = [torch.ones(size // 16, dtype=torch.uint8) for _ in range(16)]
        held = process_memory().rss_bytes
        del tensors[:]
    return {"is_set": is_set, "held": held - before, "kept": process_memory().rss_bytes - before}


def num_faults() -> int:
    """Page faults of steps that make and free two tensors of 16 MiB: larger than any hole that imports leave in the
    heap, which malloc would look at first, and below the 32 MiB from which glibc never uses the heap."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        x = torch.ones(4 * 2**20)
        y = x + 1
        del x, y
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def without_huge_pages() -> None:
    """A fault of a huge page stands for 512."""
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def child_holds_for_a_while() -> dict[str, int]:
    """Page faults while freed memory is returned, and after."""
    without_huge_pages()
    found: dict[str, int] = {}
    first, second = hold_memory_returned(), hold_memory_returned()
    found["held"] = num_faults()
    first()
    first()  # once more does nothing
    found["still held"] = num_faults()
    second()
    num_faults()
    found["let go"] = num_faults()
    return found


def child_holds_for_good() -> int:
    """Page faults where somebody held for a while too and let go."""
    without_huge_pages()
    return_freed_memory()
    hold_memory_returned()()
    num_faults()
    return num_faults()


# Every step writes 5 * 2 * 16 MiB: 40,960 pages of 4 KiB.
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_memory_is_returned_for_a_while() -> None:
    result = run_in_subprocess(f"{__name__}:child_holds_for_a_while", env={"OMP_NUM_THREADS": "1"})
    assert result.exit_code == 0, result.stderr
    assert min(result.value["held"], result.value["still held"]) > 20 * 1024, result.value
    assert result.value["let go"] < 1024, result.value


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_memory_is_returned_for_good() -> None:
    result = run_in_subprocess(f"{__name__}:child_holds_for_good", env={"OMP_NUM_THREADS": "1"})
    assert (result.exit_code, result.value > 20 * 1024) == (0, True), (result.value, result.stderr)


def test_what_the_environment_set_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[int, int]] = []
    monkeypatch.setattr(enforce, "_set_option", lambda option, value: options.append((option, value)) or True)
    monkeypatch.setattr(enforce, "_has_glibc", lambda: True)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    enforce._set_adapted()
    assert options == [(enforce.M_MMAP_THRESHOLD, 1_000_000), (enforce.M_TRIM_THRESHOLD, 64 * MIB)]
    options.clear()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=3000000:glibc.malloc.mmap_threshold=2000000")
    enforce._set_adapted()
    assert options == [(enforce.M_MMAP_THRESHOLD, 2_000_000), (enforce.M_TRIM_THRESHOLD, 3_000_000)]


def test_reading_follows_an_allocation() -> None:
    before = process_memory()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    after = process_memory()
    assert after.rss_bytes - before.rss_bytes > 0.9 * tensor.nbytes
    assert after.peak_rss_bytes >= after.rss_bytes - MIB
    if sys.platform.startswith("linux"):
        assert before.data_bytes is not None and after.data_bytes is not None
        assert after.data_bytes - before.data_bytes > 0.9 * tensor.nbytes


@linux_only
def test_untouched_memory_counts_as_data_and_not_as_resident() -> None:
    before = process_memory()
    tensor = torch.empty(256 * MIB, dtype=torch.uint8)
    after = process_memory()
    assert before.data_bytes is not None and after.data_bytes is not None
    assert after.data_bytes - before.data_bytes >= tensor.nbytes
    assert after.rss_bytes - before.rss_bytes < 0.5 * tensor.nbytes


@linux_only
def test_peak_starts_anew() -> None:
    torch.ones(128 * MIB, dtype=torch.uint8)
    if not reset_peak_rss():
        pytest.skip("this process may not write /proc/self/clear_refs")
    memory = process_memory()
    assert memory.peak_rss_bytes - memory.rss_bytes < 16 * MIB
    torch.ones(128 * MIB, dtype=torch.uint8)
    assert process_memory().peak_rss_bytes - memory.peak_rss_bytes > 64 * MIB


@linux_only
def test_limit_is_real_and_the_peak_ends_near_it() -> None:
    extra_bytes = 300 * MIB
    result = run_in_subprocess(f"{__name__}:child_fills_a_limit", {"extra_bytes": extra_bytes})
    assert result.exit_code == 0, result.stderr
    assert result.value["num_tensors"] > 0.8 * extra_bytes / MIB
    assert abs(result.peak_rss_bytes - result.value["limit_bytes"]) < 20 * MIB


@linux_only
def test_allocation_over_the_limit_is_an_error_of_torch() -> None:
    result = run_in_subprocess(f"{__name__}:child_dies_of_a_limit", {"extra_bytes": 64 * MIB})
    assert result.exit_code == 1
    assert result.error.startswith("RuntimeError: ")
    assert "DefaultCPUAllocator: can't allocate memory" in result.error


@linux_only
def test_limit_ends_with_its_block() -> None:
    result = run_in_subprocess(f"{__name__}:child_undoes_a_limit", {"extra_bytes": 64 * MIB})
    assert (result.exit_code, result.value) == (0, 128 * MIB), result.stderr


@linux_only
def test_one_way_limit_cannot_be_raised() -> None:
    result = run_in_subprocess(f"{__name__}:child_asks_beyond_its_hard_limit", {"extra_bytes": 64 * MIB})
    assert result.exit_code == 1
    assert "hard limit of this process" in result.error


@linux_only
@pytest.mark.parametrize("limit_bytes", [0, 10 * MIB])
def test_limit_below_what_is_in_use_is_refused(limit_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"\({limit_bytes} bytes\) must be above .* raise the limit"):
        enforce_process_limit(limit_bytes)
    with pytest.raises(ValueError, match="must be above"), process_limit(limit_bytes):
        pytest.fail("the block must not run")


def test_freed_tensors_go_back_to_the_system() -> None:
    result = run_in_subprocess(f"{__name__}:child_frees", {"num_bytes": 128 * MIB})
    assert result.exit_code == 0, result.stderr
    assert result.value["is_set"] == (platform.libc_ver()[0] == "glibc")
    if result.value["is_set"]:
        assert result.value["held"] > 100 * MIB
        assert result.value["kept"] < 16 * MIB
