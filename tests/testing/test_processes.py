"""A function in a fresh process: its value, its errors, its end and its memory come back."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from flex_trainer.testing.processes import run_in_subprocess

MIB = 2**20


# Called in fresh processes by name.
def child_adds(left: int, right: int) -> dict[str, int]:
    print("adding")
    print("a warning", file=sys.stderr)
    return {"sum": left + right}


def child_reads_environment(name: str) -> str | None:
    return os.environ.get(name)


def child_raises() -> None:
    raise KeyError("missing")


def child_returns_a_set() -> set[int]:
    return {1}


def child_kills_itself(num_bytes: int) -> None:
    held = b"x" * num_bytes
    os.kill(os.getpid(), signal.SIGKILL)
    assert held


def child_sleeps() -> None:
    time.sleep(60)


def child_holds(num_bytes: int) -> int:
    return len(b"x" * num_bytes)


def test_value_and_output_come_back() -> None:
    result = run_in_subprocess(f"{__name__}:child_adds", {"left": 2, "right": 3})
    assert (result.value, result.exit_code, result.error) == ({"sum": 5}, 0, "")
    assert (result.stdout, result.stderr) == ("adding\n", "a warning\n")


def test_environment_is_set_for_the_child_alone() -> None:
    result = run_in_subprocess(f"{__name__}:child_reads_environment", {"name": "FLEX_TEST"}, env={"FLEX_TEST": "on"})
    assert result.value == "on"
    assert "FLEX_TEST" not in os.environ


def test_error_is_named_and_its_traceback_is_kept() -> None:
    result = run_in_subprocess(f"{__name__}:child_raises")
    assert (result.value, result.exit_code, result.error) == (None, 1, "KeyError: 'missing'")
    assert "child_raises" in result.stderr


def test_value_that_is_not_json_is_an_error() -> None:
    result = run_in_subprocess(f"{__name__}:child_returns_a_set")
    assert (result.value, result.exit_code) == (None, 1)
    assert result.error.startswith("TypeError: ")


def test_killed_process_still_has_an_exit_code_and_a_peak() -> None:
    result = run_in_subprocess(f"{__name__}:child_kills_itself", {"num_bytes": 64 * MIB})
    assert (result.value, result.exit_code) == (None, -signal.SIGKILL)
    assert result.peak_rss_bytes > 64 * MIB


def test_peak_is_that_of_the_child_and_not_of_its_parent() -> None:
    ballast = b"x" * (512 * MIB)
    small = run_in_subprocess(f"{__name__}:child_holds", {"num_bytes": MIB})
    large = run_in_subprocess(f"{__name__}:child_holds", {"num_bytes": 128 * MIB})
    assert small.peak_rss_bytes < len(ballast)
    assert large.peak_rss_bytes - small.peak_rss_bytes > 100 * MIB


def test_slow_function_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="child_sleeps did not finish within timeout_s=1 seconds"):
        run_in_subprocess(f"{__name__}:child_sleeps", timeout_s=1)
    assert time.monotonic() - start < 10


def test_name_without_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'package.module:name'"):
        run_in_subprocess("os.getpid")
