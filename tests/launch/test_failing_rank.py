"""Which failures are those of another rank, what is told, and how a process ends. Launchers: tests/distributed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flex_trainer.errors import UserError
from flex_trainer.launch import failing_rank
from flex_trainer.launch.failing_rank import flush_at_failure, is_lost_peer, rank_name, ranks_fail_together, watch
from flex_trainer.testing.ranks import free_port
from tests.tiers import first_quick

JOBS = [sys.executable, "-m", "tests.launch.failing_jobs"]
ROOT = Path(__file__).resolve().parents[2]


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process, rank 1 of 2, would have ended."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(failing_rank.os, "_exit", leave)
    monkeypatch.setattr(failing_rank, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(failing_rank, "_TELL_SECONDS", 0.0)
    return codes


def fail(error: Exception) -> None:
    with pytest.raises(Left), ranks_fail_together():
        raise error


def test_one_process_raises_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    watch()
    with pytest.raises(ValueError, match="mine"), ranks_fail_together():
        raise ValueError("mine")


def test_an_error_names_its_rank_last(ends: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    fail(ValueError("too\nmuch"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == f"{rank_name()}: ValueError: too much"
    assert lines[-1].startswith("rank 1 of 2 on ")
    assert ends == [1]


def test_a_mistake_is_one_line(ends: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    fail(UserError("memory_limit=1 is too low"))
    assert capsys.readouterr().err == "Error (rank 1): memory_limit=1 is too low\n"
    assert ends == [2]


def test_who_lost_its_peer_says_so(ends: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    except RuntimeError as error:
        fail(error)
    assert f"\n{rank_name()} lost another rank: [gloo/transport" in capsys.readouterr().err
    assert ends == [1]


def test_what_is_a_lost_peer() -> None:
    lost = RuntimeError("NCCL error: remote process exited or there was a network error")
    outer = ValueError("while logging")
    outer.__cause__ = lost
    assert is_lost_peer(lost) and is_lost_peer(outer)
    assert not is_lost_peer(RuntimeError("can't allocate memory"))
    assert not is_lost_peer(BrokenPipeError("Broken pipe"))  # of a terminal or a file, not of a rank


def test_what_is_held_back_is_written(ends: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []

    def broken(code: int) -> None:
        raise OSError("tracker is gone")

    flush_at_failure(codes.append)
    flush_at_failure(broken)  # does not keep the others from it
    fail(UserError("mine"))
    assert codes == [2] and ends == [2]
    assert "tracker is gone" in capsys.readouterr().err
    fail(UserError("mine"))
    assert codes == [2]  # once


def test_what_hangs_does_not_keep_a_rank(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failing_rank, "_FLUSH_SECONDS", 0.1)
    flush_at_failure(lambda code: time.sleep(30))
    began = time.monotonic()
    fail(ValueError("mine"))
    assert time.monotonic() - began < 10 and ends == [1]


# Processes


class Ranks:
    """Processes of `failing_jobs`, started without a launcher that would end them."""

    def __init__(self, job: str, num_ranks: int, world_size: int | None = None) -> None:
        self._processes = []
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size or num_ranks)}
            process = subprocess.Popen(
                [*JOBS, job], env={**os.environ, **settings, **own}, stderr=subprocess.PIPE, text=True
            )
            self._processes.append(process)

    def wait(self) -> list[tuple[int, str]]:
        """Exit code and standard error of each."""
        try:
            return [(process.returncode, error) for process in self._processes for _, error in [process.communicate()]]
        finally:
            for process in self._processes:
                process.kill()


@pytest.mark.parametrize("job", first_quick(["end-slowly", "end-waiting", "end-after-destroying"]))
def test_a_rank_that_has_ended_well_ends_well(job: str) -> None:
    """Whatever the watching thread is doing when the process goes down."""
    ((code, error),) = Ranks(job, 1, world_size=2).wait()
    assert code == 0, error


@pytest.mark.sweep
def test_without_being_stopped_the_thread_aborts_it() -> None:
    """Why it is stopped. When this fails, there is no need to."""
    ((code, error),) = Ranks("end-slowly-without-stopping", 1, world_size=2).wait()
    assert code == -signal.SIGABRT, error
    assert "terminate called without an active exception" in error


def test_a_rank_that_ended_before_the_others_is_named() -> None:
    """Its data has a batch less: who loses it in a collective says which rank that was, and that it ended well."""
    first, second = Ranks("uneven", 2).wait()
    assert second == (0, second[1])
    assert first[0] == 1
    line = first[1].splitlines()[-1]
    assert line.startswith("rank 0 of 2 on ") and " lost another rank: " in line
    assert "(rank 1 of 2 on " in line
    assert line.endswith(" had ended before, without an error: every rank needs the same number of batches)")


def test_a_failure_wakes_the_others_at_once() -> None:
    """And they ask nothing meanwhile."""
    first, second, third = Ranks("fail", 3).wait()
    assert first[0] == 1 and first[1].splitlines()[-1].endswith("ValueError: rank 0 has had enough")
    for code, error in (second, third):
        assert code == 1
        assert "ends, since another has failed: rank 0 of 3 on " in error.splitlines()[-1]
        assert "seconds after: 0." in error and "asked: 0" in error
