"""`flex-trainer accelerate-config` prints the path of a file, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from flex_trainer.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["accelerate-config", *arguments])
    return int(exit_.value.code or 0)


def test_prints_just_the_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("qwen3_30b_a3b_8gpu") == 0
    output = capsys.readouterr().out
    path = Path(output.removesuffix("\n"))
    assert path.is_file()
    assert ClusterConfig.from_yaml_file(str(path)).num_processes == 8


def test_a_launcher_that_shards(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("qwen3_30b_a3b_8gpu", "accelerate=gpu_8proc_fsdp2", "parallel.fsdp=1", "parallel.ep=1") == 0
    settings = ClusterConfig.from_yaml_file(capsys.readouterr().out.removesuffix("\n"))
    assert settings.fsdp_config is not None
    assert settings.fsdp_config["fsdp_version"] == 2


def test_overrides_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "launch.yaml"
    assert run("demo", "accelerate=cpu_2proc", "--output", str(output)) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert ClusterConfig.from_yaml_file(str(output)).num_processes == 2


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "launch.yaml"
    override = "accelerate={distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_versoin: 2}}"
    assert run("demo", override, "--output", str(output)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "Error: demo.yaml: accelerate.fsdp_config.fsdp_versoin: accelerate would ignore it; "
        "did you mean 'fsdp_version'?\n"
    )
    assert not output.exists()
