"""Which failures are somebody else's, and that one process is left alone. Real ranks: tests/distributed."""

from __future__ import annotations

import pytest

from flex_trainer.errors import UserError
from flex_trainer.launch import failing_rank
from flex_trainer.launch.failing_rank import is_lost_peer, rank_name, ranks_fail_together, watch


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
    monkeypatch.setattr(failing_rank, "_POLL_SECONDS", 0.0)
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
