"""`flex-trainer doctor`: facts, and traps in launch settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flex_trainer import doctor as diagnosis
from flex_trainer import process_memory
from flex_trainer.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *arguments])
    return int(exit_.value.code or 0)


@pytest.fixture(autouse=True)
def _no_default_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelerate.commands.config.config_args.default_config_file", str(tmp_path / "default_config.yaml")
    )
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("COLUMNS", "300")


def test_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    output = capsys.readouterr().out
    for topic in ("Python", "torch", "transformers", "accelerate", "process", "machine", "RLIMIT_DATA", "cgroup"):
        assert topic in output
    assert "recipes bring their own" in output


def test_the_default_accelerate_configuration_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "default_config.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert run() == 1
    assert "MULTI_CPU without mpirun starts one process, not 2" in capsys.readouterr().out


def test_a_given_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_offload_param: false, x: 'true'}\n")
    assert run("--config", str(path)) == 1
    output = capsys.readouterr().out
    assert "did you mean 'fsdp_offload_params'" in output
    assert "the text 'true' is not a boolean" in output
    path.write_text("distributed_type: 'NO'\n")
    assert run("--config", str(path)) == 0


def test_a_configuration_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", "nowhere.yaml") == 2
    assert capsys.readouterr().err == "Error: accelerate configuration 'nowhere.yaml' does not exist\n"


def test_environment_that_overrides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert run() == 0
    assert "ACCELERATE_USE_CPU=true overrides" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "expected"), [("max\n", None), ("1048576\n", 2**20), ("9223372036854771712\n", None)]
)
def test_cgroup_limit(content: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory.max"
    path.write_text(content)
    monkeypatch.setattr(process_memory, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(path)))
    assert process_memory.cgroup_limit_bytes() == expected


def test_other_versions_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "version", lambda name: "9.9.0")
    findings = {finding.topic: finding for finding in diagnosis._versions()}
    assert findings["torch"].level == "note"
    assert findings["torch"].text == "9.9.0 (tested with 2.13)"


@pytest.mark.parametrize(
    ("backend", "settings", "level", "text"),
    [
        ("native", "", "note", "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("native", "expandable_segments:True", "ok", "expandable segments are on"),
        ("cudaMallocAsync", "", "info", "keeps no statistics"),
    ],
)
def test_the_allocator_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: str, settings: str, level: str, text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    finding = diagnosis._allocator()
    assert finding.level == level and text in finding.text
