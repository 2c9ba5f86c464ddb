"""The process's meter: windows see peaks inside them and nothing else, and a hard limit counts where it is nearer."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time

import pytest
import torch

from flex_trainer.memory.enforce import process_limit, return_freed_memory
from flex_trainer.memory.meter import meter_for
from flex_trainer.memory.process import process_memory
from flex_trainer.memory.process_meter import ProcessMeter
from flex_trainer.testing.processes import run_in_subprocess

MIB = 2**20


def test_meter_of_a_device() -> None:
    assert isinstance(meter_for(torch.device("cpu")), ProcessMeter)
    with pytest.raises(ValueError, match=r"on cpu and cuda devices, not on 'meta'"):
        meter_for(torch.device("meta"))


def test_reads_what_the_system_says() -> None:
    meter = ProcessMeter()
    assert abs(meter.in_use_bytes() - process_memory().rss_bytes) < 8 * MIB
    assert set(meter.now()) == {"process"}
    assert meter.auto_bytes() > meter.in_use_bytes()


def test_window_sees_the_peak_inside_it() -> None:
    return_freed_memory()
    meter = ProcessMeter()
    meter.start_window()
    before = meter.in_use_bytes()
    tensor = torch.ones(64 * MIB // 4)
    meter.sample()
    del tensor
    peak_bytes = meter.peak_bytes()
    meter.end_window()
    assert peak_bytes - before > 56 * MIB
    # The next window starts from what is in use then.
    meter.start_window()
    assert meter.peak_bytes() - before < 32 * MIB
    meter.end_window()


def test_a_peak_between_samples_is_seen_by_the_sampler_or_the_high_water_mark() -> None:
    return_freed_memory()
    meter = ProcessMeter()
    meter.start_window()
    before = meter.in_use_bytes()
    tensor = torch.ones(64 * MIB // 4)
    time.sleep(0.1)  # nobody calls sample()
    del tensor
    assert meter.peak_bytes() - before > 56 * MIB
    meter.end_window()


def num_samplers() -> int:
    return sum(thread.name == "flex-memory" for thread in threading.enumerate())


def test_sampler_ends_with_its_meter() -> None:
    gc.collect()
    before = num_samplers()
    meter = ProcessMeter()
    meter.start_window()
    assert num_samplers() == before + 1
    del meter
    deadline = time.monotonic() + 5
    while num_samplers() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_samplers() == before


def test_left_is_what_the_limit_leaves() -> None:
    meter = ProcessMeter()
    limit_bytes = meter.in_use_bytes() + 100 * MIB
    assert abs(meter.left_bytes(limit_bytes) - 100 * MIB) < 8 * MIB
    assert meter.left_bytes(1) < 0


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ProcessMeter()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole_bytes, auto_bytes = meter.device_bytes(), meter.auto_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert meter.device_bytes() == whole_bytes // 4
    in_use_bytes = meter.in_use_bytes()
    quarter_bytes = (auto_bytes - in_use_bytes) / 4
    # Other processes of this machine come and go between the two readings.
    assert meter.auto_bytes() - in_use_bytes == pytest.approx(quarter_bytes, rel=0.2)


# Called in a fresh process by name.
def child_measures_under_a_hard_limit() -> dict[str, int]:
    meter = ProcessMeter()
    roomy_bytes = meter.in_use_bytes() + 1000 * MIB
    without = meter.left_bytes(roomy_bytes)
    with process_limit(meter.in_use_bytes() + 100 * MIB):
        capped, total = meter.left_bytes(roomy_bytes), meter.auto_bytes() - meter.in_use_bytes()
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    return {"without": without, "capped": capped, "total": total}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux caps all data memory")
def test_a_hard_limit_counts_where_it_is_nearer() -> None:
    result = run_in_subprocess(f"{__name__}:child_measures_under_a_hard_limit", env={"OMP_NUM_THREADS": "1"})
    assert result.exit_code == 0, result.stderr
    assert abs(result.value["without"] - 1000 * MIB) < 8 * MIB
    assert abs(result.value["capped"] - 100 * MIB) < 8 * MIB
    assert 0.8 * 100 * MIB < result.value["total"] <= 100 * MIB


def test_samples_are_a_millisecond_apart_and_the_peak_looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ProcessMeter()
    meter.start_window()
    meter.end_window()  # the thread that samples rests
    time.sleep(0.02)
    readings = iter(range(10**9, 2 * 10**9))
    monkeypatch.setattr(meter, "in_use_bytes", lambda: next(readings))
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    for _ in range(100):
        meter.sample()
    assert meter._window_peak == 10**9, "one reading for all of them"
    meter._note()
    assert meter._window_peak == 10**9 + 1
    monkeypatch.setattr(time, "monotonic", lambda: 1e9 + 0.002)
    meter.sample()
    assert meter._window_peak == 10**9 + 2
