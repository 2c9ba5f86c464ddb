"""The process's meter: windows see peaks inside them and nothing else, and a hard limit counts where it is nearer."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
import weakref
from typing import Any

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
    time.sleep(0.1)  # sample() is not called
    del tensor
    assert meter.peak_bytes() - before > 56 * MIB
    meter.end_window()


def looks(seconds: float, windows: int = 1, cost_seconds: float = 0.0) -> int:
    """How often the thread looks in a window of so many seconds that comes after others as long."""
    meter = ProcessMeter()
    sampler, now = meter._sampler, [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flex_trainer.memory.process_meter.time.monotonic", lambda: now[0])
        patch.setattr(sampler, "_has_thread", True)
        num_looks = 0
        for _ in range(windows):
            end, num_looks = now[0] + seconds, 0
            sampler.open()
            while now[0] < end:
                now[0] += sampler._interval(cost_seconds)
                num_looks += 1
            sampler.pause()
    return num_looks


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        (0.03, 10, 10),  # every 3 ms
        (0.3, 100, 100),
        (2.0, 100, 150),  # was 667
        (20.0, 400, 460),  # every 50 ms
    ],
)
def test_looks_at_memory_as_often_as_the_step_is_long(seconds: float, least: int, most: int) -> None:
    assert least <= looks(seconds, windows=3) <= most


def test_a_short_window_after_a_long_one_is_looked_into_closely() -> None:
    meter = ProcessMeter()
    sampler = meter._sampler
    sampler._window_seconds = 10.0
    now = time.monotonic()
    sampler._opened_at = now
    assert sampler._interval(0.0) == pytest.approx(0.003, abs=1e-3)
    sampler._opened_at = now - 0.2
    assert sampler._interval(0.0) == pytest.approx(0.01, abs=1e-3)
    sampler._opened_at = now - 10
    assert sampler._interval(0.0) == 0.05


def test_looks_that_take_long_come_less_often() -> None:
    assert looks(1.0, cost_seconds=0.0004) == 50  # each 0.02 s, of which 0.0004 s are the look
    assert looks(1.0, cost_seconds=1.0) == 20


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flex-memory"]


def test_sampler_ends_with_its_meter_and_the_file_after_it() -> None:
    gc.collect()
    before = samplers()
    meter = ProcessMeter()
    assert samplers() == before, "nothing is sampled before a window is opened"
    meter.start_window()
    (thread,) = set(samplers()) - set(before)
    file = weakref.ref(meter._sampler.memory._statm)
    assert meter._sampler.memory._statm is not None
    number = meter._sampler.memory._statm.fileno()
    is_held = threading.Event()
    sampler = meter._sampler
    sampler.note = lambda: is_held.wait(5) or 0  # type: ignore[method-assign]  # the thread is in the middle of a sample
    time.sleep(0.02)
    del sampler, meter
    assert thread.is_alive() and file() is not None
    os.fstat(number)  # open still
    is_held.set()
    thread.join(5)
    assert not thread.is_alive()
    gc.collect()
    assert file() is None


def test_meters_that_are_dropped_leave_no_thread_no_file_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    gc.collect()
    before = set(samplers())
    num_files = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        meter = ProcessMeter()
        meter.start_window()
        if number % 2:
            meter.end_window()
        del meter
        with open(os.devnull):  # takes the number of a file that was closed
            pass
    for thread in set(samplers()) - before:
        thread.join(5)
    assert errors == [] and set(samplers()) <= before
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_no_peak_is_lost_between_threads_and_none_enters_the_next_window(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ProcessMeter()
    meter.start_window()
    meter.end_window()
    time.sleep(0.02)
    reading, is_read, may_go_on = [10**12], threading.Event(), threading.Event()

    class Slow:
        """Another thread's reading takes long."""

        def read(self) -> tuple[int, int]:
            now = reading[0]
            if threading.current_thread() is not threading.main_thread():
                is_read.set()
                may_go_on.wait(5)
            return now, now

    monkeypatch.setattr(meter._sampler, "memory", Slow())
    other = threading.Thread(target=meter._sampler.note)
    other.start()
    assert is_read.wait(5)
    threading.Timer(0.05, may_go_on.set).start()
    reading[0] = 5
    meter.start_window()  # waits for the one that is under way: its 10**12 belongs to the window before
    meter._sampler.pause()
    assert meter._sampler.note() == 5
    other.join()
    # Two threads at once: the higher one of two readings stays.
    is_read.clear()
    may_go_on.clear()
    reading[0] = 7
    other = threading.Thread(target=meter._sampler.note)
    other.start()
    assert is_read.wait(5)
    threading.Timer(0.05, may_go_on.set).start()
    reading[0] = 9
    meter._sampler.note()
    other.join()
    assert meter._sampler.note() == 9


# Called in a fresh process by name: it forks.
def child_forks_inside_a_window() -> dict[str, int]:
    meter = ProcessMeter()
    meter.start_window()
    read_end, write_end = os.pipe()
    meter._sampler._lock.acquire()  # as the thread may have it when the fork comes
    child = os.fork()
    if child == 0:
        meter.start_window()
        before = meter.in_use_bytes()
        block = torch.ones(64 * MIB // 4)
        time.sleep(0.1)  # for the child's own thread
        grown = meter._sampler._peak_bytes - before
        del block
        os.write(write_end, str(grown).encode())
        os._exit(0)
    meter._sampler._lock.release()
    _, status = os.waitpid(child, 0)
    return {"grown": int(os.read(read_end, 64)), "status": status, "parent": meter._sampler.note()}


def test_a_forked_child_measures_itself() -> None:
    result = run_in_subprocess(f"{__name__}:child_forks_inside_a_window", env={"OMP_NUM_THREADS": "1"})
    assert result.exit_code == 0, result.stderr
    assert result.value["status"] == 0 and result.value["grown"] > 56 * MIB


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
    monkeypatch.setattr(meter._sampler.memory, "read", lambda: (next(readings), 0))
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    for _ in range(100):
        meter.sample()
    assert meter._sampler._peak_bytes == 10**9, "one reading for all of them"
    meter._sampler.note()
    assert meter._sampler._peak_bytes == 10**9 + 1
    monkeypatch.setattr(time, "monotonic", lambda: 1e9 + 0.002)
    meter.sample()
    assert meter._sampler._peak_bytes == 10**9 + 2
