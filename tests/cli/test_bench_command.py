"""`flex-trainer bench`: the result on the terminal and in a file, with a benchmark that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flex_trainer import bench as benchmarks
from flex_trainer.cli import main

RESULT = {
    "name": "step",
    "machine": {"cpu": "any"},
    "figures": {"ratio": 0.75, "losses_equal": True},
    "bounds": {"ratio": 0.8},
    "meets": {"1": True, "2": False},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    calls = []

    def run(name: str, quick: bool) -> dict:
        calls.append((name, quick))
        return RESULT

    monkeypatch.setattr(benchmarks, "run", run, raising=False)
    return calls


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    return int(exit_.value.code or 0)


def test_a_missed_bound_is_reported_and_exits_with_0(calls: list, tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.json"
    assert run("step", "--json", str(path), "--quick") == 0
    assert calls == [("step", True)]
    assert json.loads(path.read_text()) == RESULT
    output = capsys.readouterr().out
    assert "requirement 1" in output and "met" in output
    assert "requirement 2" in output and "missed" in output


def test_a_file_that_could_not_be_written_is_told_before_measuring(calls: list, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert run("step", "--json", str(tmp_path / "file" / "step.json")) == 2
    assert calls == []
    assert "the benchmark result cannot be written to" in capsys.readouterr().err
