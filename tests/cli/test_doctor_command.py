"""`flex-trainer doctor`: facts, and traps in launch settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from flex_trainer.cli import main
from flex_trainer.launch import doctor as diagnosis
from flex_trainer.launch import findings as launch_findings
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.memory import process as process_memory


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *arguments])
    return int(exit_.value.code or 0)


@pytest.fixture(autouse=True)
def _no_default_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelerate.commands.config.config_args.default_config_file", str(tmp_path / "default_config.yaml")
    )
    for name in ("ACCELERATE_USE_CPU", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
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
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config: {fsdp_version: 2, fsdp_offload_param: false, x: 'true'}\n"
    )
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


def test_what_a_launcher_left_behind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run() == 1
    output = capsys.readouterr().out
    assert "RANK=0, WORLD_SIZE=2 left over from a launcher" in output and "unset RANK WORLD_SIZE" in output


def test_a_recipe_for_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--recipe", "demo_2ranks") == 0
    output = capsys.readouterr().out
    assert "demo_2ranks: 2 processes" in output
    assert "weights over 2 ranks, experts over 2, 1 copy; experts get their tokens by flex" in output
    assert "2 on the CPU of a machine, over gloo" in output
    assert "accelerate launch --config_file $(flex-trainer accelerate-config demo_2ranks)" in output


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.replicate=2"], "2 does not fit parallel: replicate=2 x fsdp=2 x pp=1 is 4 processes"),
        (["parallel={fsdp: 1, pp: 2}"], "parallel.pp=2: stages can be planned, not trained, in this version"),
        (["accelerate={distributed_type: MULTI_CPU, num_processes: 2}"], "MULTI_CPU without mpirun starts one process"),
        (["parallel={fsdp: 2, ep: 2}", "model.config.n_routed_experts=9", "model.config.n_group=1",
          "model.config.topk_group=1"], "parallel.ep=2 does not divide the 9 experts"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_launched(overrides: list[str], problem: str, capsys) -> None:
    assert run("--recipe", "demo_2ranks", *overrides) > 0
    captured = capsys.readouterr()
    assert problem in captured.out + captured.err


def test_overrides_need_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parallel.fsdp=2") == 2
    assert "name it with --recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_gpus", "level", "text"),
    [
        (0, "note", "no GPU here: 8 processes would share the CPU and talk over gloo, not NCCL"),
        (4, "problem", "8 processes for 4 GPUs of this machine"),
        (8, "info", "8 on the 8 GPUs of a machine, over NCCL"),
    ],
)
def test_gpus_for_the_processes(num_gpus: int, level: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    findings = list(launch_findings.recipe_findings(load_recipe("qwen3_30b_a3b_16gpu")))
    ranks = [finding for finding in findings if finding.topic == "ranks"]
    assert [finding.level for finding in ranks] == [level]
    assert ranks[0].text.startswith(text)
    start = next(finding.text for finding in findings if finding.topic == "start")
    assert start.startswith("on each machine: ") and "--machine_rank N --main_process_ip ADDRESS_OF_MACHINE_0" in start
    assert "main_process_ip is not in the settings" in next(f.text for f in findings if f.topic == "address")


@pytest.mark.parametrize(("num_machines", "level"), [(1, "note"), (2, "problem")])
def test_a_port_that_is_taken(num_machines: int, level: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = {"num_processes": 2, "num_machines": num_machines, "main_process_port": port}
        findings = list(launch_findings._port_findings(settings, num_machines))
    assert [finding.level for finding in findings if f"{port} is taken" in finding.text] == [level]


def test_fsdp_on_cpu_processes_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    settings = "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2}}"
    overrides = ["parallel={fsdp: 1, ep: 1}", f"accelerate={settings}"]
    assert run("--recipe", "demo_2ranks", *overrides) == 0
    output = capsys.readouterr().out
    assert "does not shard on CPU processes" in output and "every process holds the whole model (DDP)" in output


def test_zero_3_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zero.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3}\n")
    assert run("--config", str(path)) == 1
    assert "DeepSpeed ZeRO stage 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.per_device_train_batch_size=-1", "per_device_train_batch_size: -1 must be at least 1"),
        ("training.learning_rate=-1", "learning_rate: -1 must not be negative"),
        ("model.config.num_attention_heads=0", "model.config.num_attention_heads: 0 must be at least 1"),
        ("report.html=/proc/none/report.html", "the report cannot be written to"),
        ("training.output_dir=/proc/none", "the run cannot be written to"),
        ("data.sequence_length=4096", "is more than the model's max_position_embeddings=1024"),
    ],
)
def test_mistakes_of_a_recipe_are_one_line(override: str, message: str, capsys) -> None:
    assert run("--recipe", "demo", override) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
