"""`flex-trainer profile`: measures, shows, and writes what `plan --hardware machine` reads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flex_trainer.cli import main
from flex_trainer.cost.hardware import knee_bytes
from flex_trainer.errors import UserError
from flex_trainer.estimate.machine import find_hardware, load_machine, machine_file


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["profile", *arguments])
    return int(exit_.value.code or 0)


def test_this_machine_is_measured_and_found_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick", "--device", "cpu") == 0
    output = capsys.readouterr().out
    assert output.endswith("Use it with: flex-trainer plan RECIPE --hardware machine\n")
    assert "knee S" in output and "offload" in output and "matmul float32" in output
    hardware = find_hardware("machine")
    assert hardware == load_machine(machine_file())
    assert set(hardware.peak_flops) == {"float32", "bfloat16"}
    assert not hardware.is_gpu and hardware.runtime_bytes > 0
    assert hardware.offload is not None and hardware.rates().offload == hardware.offload
    content = json.loads(machine_file().read_text())
    assert content["knees"]["offload"]["knee_bytes"] == pytest.approx(knee_bytes(hardware.offload))
    assert {found["what"] for found in content["measurements"]} == {"matmul", "grouped_matmul", "copy"}
    assert all(found["seconds"] > 0 for found in content["measurements"])
    # An operator takes as long as it was measured to take.
    best = max(found["flops_per_second"] for found in content["measurements"] if found.get("dtype") == "float32")
    assert hardware.operator_seconds(best, 0, "float32") == pytest.approx(1.0, rel=1e-3)


def test_a_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--quick", "--device", "cpu", "--output", "my figures", "--offload-to", str(tmp_path)) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Use it with: ")]
    *command, name = shlex.split(told.removeprefix("Use it with: "))
    assert command == ["flex-trainer", "plan", "RECIPE", "--hardware"]
    assert find_hardware(name) == load_machine(tmp_path / "my figures")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is unreadable"),
        ('{"format": 0, "hardware": {}}', "format 0, expected 1"),
        ('{"format": 1}', "KeyError: 'hardware'"),
    ],
)
def test_files_that_are_no_profile(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_machine(path)


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "tpu") == 2
    assert "--device 'tpu' must be cpu or cuda" in capsys.readouterr().err
