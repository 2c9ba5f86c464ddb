"""Checkpoints of runs in one process: resumed with their experts and with what the planner has learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.checkpoint import CheckpointError
from tests.distributed import checkpoint_jobs as jobs
from tests.tiers import first_quick


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose files hold experts one by one, where the model has them in one parameter."""
    directory = tmp_path_factory.mktemp("start")
    jobs.save_tiny(directory)
    return directory


def _load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _differ(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def test_a_run_goes_on_as_if_it_had_not_stopped(start: Path, tmp_path: Path) -> None:
    whole = jobs.train(start, tmp_path / "whole")
    jobs.train(start, tmp_path / "parts", settings={"max_steps": 3})
    resumed = jobs.train(start, tmp_path / "parts", resume=True)
    jobs.assert_same_run(resumed, whole)


def test_trainer_alone_would_lose_the_experts(start: Path, tmp_path: Path) -> None:
    """Why weights of ordinary checkpoints are not left to it. When this fails, weights.py can go."""
    trained = jobs.train(start, tmp_path, settings={"max_steps": 3}).parameters
    trainer = jobs.make_trainer(_load(start), tmp_path, Trainer)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-3"))
    lost = _differ(_parameters(trainer.model), trained)
    assert lost and all(".experts." in name for name in lost)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: its files hold experts one by one too."""
    directory = tmp_path_factory.mktemp("fused")
    jobs.save_tiny(directory, "qwen3_moe")
    return directory


@pytest.mark.parametrize("trainer_class", first_quick([FlexTrainer, Trainer]))
def test_the_best_model_at_the_end(fused: Path, tmp_path: Path, trainer_class: Any) -> None:
    """Trainer (5.24) leaves the experts at their last values. When that fails here, docs/checkpoints.md must change."""
    trainer = jobs.make_trainer(_load(fused), tmp_path, trainer_class, **jobs.KEEP_THE_WORST)
    trainer.train()
    best, last = (_parameters(_load(tmp_path / f"checkpoint-{step}")) for step in (3, 6))
    found = _parameters(trainer.model)
    experts = [name for name in found if ".experts." in name]
    assert experts
    assert _differ(found, best) == ([] if trainer_class is FlexTrainer else experts)
    assert _differ({name: found[name] for name in experts}, {name: last[name] for name in experts}) == (
        experts if trainer_class is FlexTrainer else []
    )


class Stream(torch.utils.data.IterableDataset):
    """Rows that two workers read in turns."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None and worker.num_workers == 2
        yield from jobs._dataset(64)[worker.id :: worker.num_workers]


@pytest.mark.parametrize("trainer_class", first_quick([FlexTrainer, Trainer]))
def test_a_stream_goes_on_in_the_middle_of_an_epoch(fused: Path, tmp_path: Path, trainer_class: Any) -> None:
    """With workers. The batches are right with Trainer as well (a dense model would be equal); its experts are not."""
    settings = {"dataloader_num_workers": 2, "max_steps": 4, "save_steps": 2}
    losses = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trainer = jobs.make_trainer(_load(fused), tmp_path, trainer_class, **settings)
        trainer.train_dataset = Stream()
        trainer.train(resume_from_checkpoint=resume)
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    whole, resumed = losses
    assert len(whole) == 4 and resumed[:2] == whole[:2]
    assert (resumed == whole) == (trainer_class is FlexTrainer)
    assert resumed == pytest.approx(whole, rel=1e-2)  # the same batches


def test_the_best_model_has_its_experts(start: Path, tmp_path: Path) -> None:
    run = jobs.train(start, tmp_path, settings=jobs.KEEP_THE_WORST)
    assert _differ(run.parameters, _parameters(_load(tmp_path / "checkpoint-3"))) == []
    assert _differ(run.parameters, _parameters(_load(tmp_path / "checkpoint-6"))) != []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-3")


def test_weights_of_several_dtypes_are_exact(start: Path, tmp_path: Path) -> None:
    model = _load(start).bfloat16()
    model.lm_head.float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    other = _load(start).bfloat16()
    other.lm_head.float()
    trainer = jobs.make_trainer(other, tmp_path / "out")
    trainer._load_from_checkpoint(str(tmp_path))
    assert _differ(_parameters(other), _parameters(model)) == []


def test_old_checkpoints_go_when_a_new_one_is_complete(start: Path, tmp_path: Path) -> None:
    jobs.train(start, tmp_path, settings={"save_steps": 1, "save_total_limit": 2, "max_steps": 4})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_a_disk_that_is_full(start: Path, tmp_path: Path) -> None:
    kind, message, _ = jobs.fail_to_save(start, tmp_path, None, failing_rank=0, settings={"save_total_limit": 1})
    assert kind == "CheckpointWriteError"
    assert message.startswith("checkpoint-6 was not saved (the model; rank 0: ")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_checkpoint_of_a_run_that_died_is_refused(start: Path, tmp_path: Path) -> None:
    trainer = jobs.make_trainer(_load(start), tmp_path)
    with pytest.raises(ValueError, match="was never completed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "saving-checkpoint-3" / "checkpoint-3"))
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)


def test_weights_that_are_not_all_there(start: Path, tmp_path: Path) -> None:
    jobs.save_tiny(tmp_path / "other", num_hidden_layers=2)
    trainer = jobs.make_trainer(_load(start), tmp_path / "out")
    with pytest.raises(ValueError, match="lacks .* weights of this DeepseekV3ForCausalLM"):
        trainer._load_from_checkpoint(str(tmp_path / "other"))


def test_what_the_planner_has_learnt_is_in_it(start: Path, tmp_path: Path) -> None:
    """The first micro-batch of a resumed run has a plan, without a trace and without a seed profile."""
    flex = FlexConfig(memory_limit="8GiB", trace=False)
    trainer = jobs.make_trainer(_load(start), tmp_path, FlexTrainer, flex=flex, max_steps=3)
    trainer.train()
    assert isinstance(trainer, FlexTrainer)
    assert trainer.flex.records[0].is_profile  # nothing was known
    assert (tmp_path / "checkpoint-3" / "flex_planner_0.json").is_file()
    resumed = jobs.make_trainer(_load(start), tmp_path, FlexTrainer, flex=flex)
    resumed.train(resume_from_checkpoint=True)
    assert isinstance(resumed, FlexTrainer)
    assert not any(record.is_profile for record in resumed.flex.records)
    assert resumed.flex.records[0].predicted_bytes == trainer.flex.records[-1].predicted_bytes


def test_a_failure_of_anything_else_ends_training_too(start: Path, tmp_path: Path) -> None:
    class Forgetful(jobs.CheckpointTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            raise KeyError("stream")

    trainer = jobs.make_trainer(_load(start), tmp_path, Forgetful)
    with pytest.raises(CheckpointError, match="rank 0: KeyError: 'stream'") as caught:
        trainer.train()
    assert not isinstance(caught.value, ValueError)
    assert list(tmp_path.iterdir()) == []
