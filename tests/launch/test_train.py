"""`python -m flex_trainer.train`: a whole run of a tiny recipe."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flex_trainer.data.samples import TokenDataset
from flex_trainer.launch.build import training_arguments
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.launch.stopping import Terminated, stop_as_exit_code
from flex_trainer.train import _flush_trackers, _hide_gpus, _prepare_wandb, _take_one_gpu, main, run
from flex_trainer.trainer import FlexTrainer

TINY = """
model:
  architecture: qwen3_moe
  config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
           moe_intermediate_size: 16, intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2}
data: {name: stdlib, sequence_length: 64, domains: [data], sampling: {lengths: skewed}}
training: {max_steps: 3, per_device_train_batch_size: 2, use_cpu: true, save_strategy: no, logging_steps: 1,
           disable_tqdm: true}
report: {html: report.html}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_a_run_ends_with_summary_and_report(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run(load_recipe(tiny))
    assert trainer.state.global_step == 3
    assert len(trainer.flex.records) == 3
    dataset = trainer.train_dataset
    assert isinstance(dataset, TokenDataset)
    num_tokens = [record.num_tokens for record in trainer.flex.records]
    assert num_tokens == [2 * len(dataset.samples[2 * index]) for index in range(3)]
    output = capsys.readouterr().out
    assert "memory limit" in output
    assert (tmp_path / "runs" / "tiny" / "report.html").read_text().lower().startswith("<!doctype html>")


def test_the_same_recipe_gives_the_same_losses(tiny: str) -> None:
    def losses() -> list[float]:
        return [entry["loss"] for entry in run(load_recipe(tiny)).state.log_history if "loss" in entry]

    first = losses()
    assert len(first) == 3
    assert losses() == first


def test_wandb_stays_offline_without_a_key(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_DIR"):  # set and deleted, so that what the run sets is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    run(load_recipe(tiny, ["report.to=[wandb]", "training.max_steps=1"]))
    assert os.environ["WANDB_MODE"] == "offline"
    runs = list((tmp_path / "runs" / "tiny" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    assert "no API key found, so the run is kept offline" in capsys.readouterr().out


@pytest.mark.parametrize("can_be_written", [True, False])
def test_wandb_needs_no_home_that_can_be_written(
    can_be_written: bool, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    for name in ("WANDB_DIR", *names):  # set and deleted, so that what is set here is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if not can_be_written:
        (tmp_path / "home").write_text("no directory")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _prepare_wandb(training_arguments(load_recipe(tiny, ["report.to=[wandb]"])), Console())
    expected = [None] * 3 if can_be_written else [f"runs/tiny/wandb/{name}" for name in ("share", "cache", "config")]
    assert [os.environ.get(name) for name in names] == expected


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, Terminated),
        pytest.param(signal.SIGINT, KeyboardInterrupt, marks=pytest.mark.sweep),
    ],
)
def test_a_run_that_is_stopped_leaves_summary_and_report(
    number: signal.Signals,
    error: type[BaseException],
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Stopped(FlexTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2:
                os.kill(os.getpid(), number)
            return super().training_step(*args, **kwargs)

    monkeypatch.setattr("flex_trainer.train.FlexTrainer", Stopped)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error) as caught:
        run(load_recipe(tiny))
    assert type(caught.value) is error
    assert signal.getsignal(signal.SIGTERM) is before
    output = capsys.readouterr().out
    assert "Stopped after 2 of 3 steps." in output and "memory limit" in output
    assert (tmp_path / "runs" / "tiny" / "report.html").read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize(("error", "code"), [(Terminated(), 143), (KeyboardInterrupt(), 130)])
def test_who_stopped_a_run_is_in_its_exit_code(error: BaseException, code: int, capsys) -> None:
    with pytest.raises(SystemExit) as exit_, stop_as_exit_code():
        raise error
    assert exit_.value.code == code
    assert capsys.readouterr().err == f"Stopped by {'SIGTERM' if code == 143 else 'SIGINT'}.\n"


def test_a_launch_for_more_processes_is_noted(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(load_recipe(tiny, ["accelerate=cpu_2proc", "training.max_steps=1"]))
    output = " ".join(capsys.readouterr().out.split())
    assert "is for 2 processes; this run has 1" in output


@pytest.mark.parametrize(
    ("variables", "use_cpu", "is_narrowed"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"WORLD_SIZE": "2"}, False, False),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, False, False),
    ],
)
def test_one_process_takes_one_gpu(
    tiny: str,
    variables: dict[str, str],
    use_cpu: bool,
    is_narrowed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # set and deleted, so that what is set here is undone
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    recipe = load_recipe(tiny, [f"training.use_cpu={str(use_cpu).lower()}"])
    _take_one_gpu(recipe, Console())
    output = capsys.readouterr().out
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("0" if is_narrowed else variables.get("CUDA_VISIBLE_DEVICES"))
    assert output.count("\n") == is_narrowed
    assert ("the first of 4" in output) is is_narrowed


@pytest.mark.parametrize(
    ("version", "parallel", "message"),
    [("1", "{}", r"FSDP version 1.*fsdp_version: 2"), ("2", "{fsdp: 2}", r"would be sharded twice")],
)
def test_fsdp_is_refused_before_weights_are_loaded(
    tiny: str, version: str, parallel: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    monkeypatch.setattr("flex_trainer.train.build_model", None)
    with pytest.raises(ValueError, match=message):
        run(load_recipe(tiny, [f"parallel={parallel}"]))


def test_a_sharded_run_on_the_cpu_sees_no_gpu(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    _hide_gpus(load_recipe(tiny))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    _hide_gpus(load_recipe(tiny, ["parallel.fsdp=2"]))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m flex_trainer.train RECIPE"),
        (["nowhere.yaml"], "recipe file 'nowhere.yaml' does not exist"),
        (["tiny.yaml", "model.config.num_expert=4"], "Qwen3MoeConfig has no such key"),
        (["tiny.yaml", "training.max_step=4"], "did you mean 'max_steps'"),
        (["tiny.yaml", "accelerate=gpu_9proc"], "no shipped configuration is called 'gpu_9proc'"),
        (["tiny.yaml", "data={files: [empty.txt]}"], "yields nothing to train on"),
        (["tiny.yaml", "parallel.ep=2"], "tiny.yaml: parallel.ep=2 does not divide fsdp=1"),
        (["tiny.yaml", "parallel={fsdp: 8, ep: 8}"], "tiny.yaml: parallel.ep=8 does not divide the 4 experts"),
        (["tiny.yaml", "parallel.pp=2"], "tiny.yaml: parallel: pp=2 is not available"),
        (["tiny.yaml", "parallel.fsdp=2"], "replicate=1 x fsdp=2 is 2 processes, and there is 1; change the sizes, or"),
        (["tiny.yaml", "parallel.fsdp=2"], "start 2: accelerate launch --config_file $(flex-trainer accelerate-config"),
        (["tiny.yaml", "parallel={fsdp: 2, dispatch: deepep}"], "parallel.dispatch: "),
        (["tiny.yaml", "report.html=/proc/none/report.html"], "report.html: the report cannot be written to"),
        (["tiny.yaml", "report.html=."], "report.html: '.' is a directory; give a file name"),
        (["tiny.yaml", "training.output_dir=/proc/none"], "training.output_dir: the run cannot be written to"),
        (["tiny.yaml", "training.output_dir=tiny.yaml/runs"], "'tiny.yaml' is a file; choose another"),
        (["tiny.yaml", "report.to=[wanddb]"], "report.to: no tracker of transformers is called 'wanddb'; did you mean"),
        (["tiny.yaml", "training.per_device_train_batch_size=0"], "per_device_train_batch_size: 0 must be at least 1"),
        (["tiny.yaml", "model.config.num_experts_per_tok=5"], "5 must be from 1 to num_experts=4; lower it, or raise"),
        (["tiny.yaml", "parallel.mixed_precision=true"], "mixed_precision=true has no effect where nothing is sharded"),
        (["tiny.yaml", "model={architecture: llama}", "parallel={fsdp: 2, ep: 2}"], "this model has no routed experts"),
    ],
)
def test_mistakes_are_one_line(tiny: str, arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("Error: ") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_trackers_write_what_they_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    wandb = SimpleNamespace(run=object(), finish=lambda exit_code: told.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    callbacks = [SimpleNamespace(tb_writer=SimpleNamespace(flush=lambda: told.append("board"))), SimpleNamespace()]
    trainer: Any = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
    _flush_trackers(trainer, 1)
    assert told == ["board", 1]
    wandb.run = None
    _flush_trackers(trainer, 2)
    assert told == ["board", 1, "board"]


def test_a_limit_that_cannot_be_enforced_names_its_key(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([tiny, "flex.memory_limit=20MiB", "flex.enforce_limit=true"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "Error: tiny.yaml: flex.memory_limit=20MiB cannot be enforced (flex.enforce_limit: true): " in error
    assert "must be above the" in error


def test_an_enforced_limit_is_shown_as_it_was_written(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enforced: list[int] = []
    monkeypatch.setattr("flex_trainer.train.enforce_process_limit", enforced.append)
    trainer = run(load_recipe(tiny, ["flex.memory_limit=3GiB", "flex.enforce_limit=true"]))
    assert trainer.flex.config.memory_limit == "3GiB"
    assert enforced == [trainer.flex.limit_bytes] == [3 * 2**30]
