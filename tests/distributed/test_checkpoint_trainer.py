"""What a user of FlexTrainer meets when a sharded model is saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from flex_trainer.testing.ranks import RankPool
from tests.distributed import checkpoint_jobs as jobs
from tests.distributed.checkpoint_jobs import EP2, JOBS

pytestmark = pytest.mark.ranks

FLEX = {**EP2, "ep_implementation": "flex"}


def test_arguments_are_the_users_own(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    """Trainer's refusal is the only error that is gone."""
    for seen in two_ranks.run(JOBS + "construct", start=start, output=tmp_path, sizes=EP2):
        assert "Resuming is not supported" in seen["plain Trainer"]
        assert seen["asked for all"] == (False, "SaveStrategy.STEPS")
        assert seen["asked for the model"] == (True, "SaveStrategy.STEPS")
        assert seen["asked for nothing"] == (False, "SaveStrategy.NO")
        message, saves_only_model = seen["no metric"]
        assert "metric_for_best_model" in message and not saves_only_model
        message, saves_only_model = seen["no data"]
        assert "eval_dataset" in message and not saves_only_model


def test_a_managed_run_goes_on_with_what_each_rank_has_learnt(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    whole = two_ranks.run(JOBS + "train_flex", start=start, output=tmp_path / "whole", sizes=FLEX)
    two_ranks.run(JOBS + "train_flex", start=start, output=tmp_path / "parts", sizes=FLEX, max_steps=3)
    resumed = two_ranks.run(JOBS + "train_flex", start=start, output=tmp_path / "parts", sizes=FLEX, resume=True)
    for (run, firsts, files), (other, other_firsts, _) in zip(resumed, whole, strict=True):
        jobs.assert_same_run(run, other)
        assert any(other_firsts) and not any(firsts)
        assert {"flex_planner_0.json", "flex_planner_1.json", "rng_state_0.pth", "rng_state_1.pth"} <= {*files}


def test_the_model_alone(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    """save_only_model: no sharded state; the weights can be gone on from, spread anew."""
    settings = {"save_only_model": True, "max_steps": 3}
    trained = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, settings=settings)
    checkpoint = tmp_path / "checkpoint-3"
    assert not (checkpoint / "sharded").exists() and (checkpoint / "model.safetensors").is_file()
    loaded = two_ranks.run(JOBS + "resume_weights", start=start, checkpoint=checkpoint, output=tmp_path, sizes=EP2)
    for run, other in zip(loaded, trained, strict=True):
        jobs.assert_same_tensors(run.parameters, other.parameters)
        assert run.moments == {}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("factored", "OddSGD keeps 'kept' of parameter"),
        ("counting", "as int and not as a tensor"),
        ("foreign", "has a parameter of shape (3,) that is none of this"),
    ],
)
def test_an_optimizer_that_cannot_be_saved_is_refused_in_the_first_step(
    two_ranks: RankPool, start: Path, tmp_path: Path, kind: str, told: str
) -> None:
    """And not at the first checkpoint, when there is something to lose."""
    job = JOBS + "train_with_an_odd_optimizer"
    for message, num_steps in two_ranks.run(job, start=start, output=tmp_path, sizes=EP2, kind=kind, settings={}):
        assert told in message and "save_only_model=True" in message
        assert num_steps == 0


@pytest.mark.parametrize(
    ("kind", "setting"), [("plain", {}), ("factored", {"save_only_model": True}), ("counting", {"save_strategy": "no"})]
)
def test_an_optimizer_that_can_or_is_not_to_be_saved_trains(
    two_ranks: RankPool, start: Path, tmp_path: Path, kind: str, setting: dict[str, Any]
) -> None:
    job = JOBS + "train_with_an_odd_optimizer"
    found = two_ranks.run(job, start=start, output=tmp_path, sizes=EP2, kind=kind, settings=setting)
    assert found == [("", 6), ("", 6)]


def test_optimizer_state_of_an_unsharded_run_is_refused(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    jobs.train(start, tmp_path, settings={"max_steps": 3})
    found = two_ranks.run(
        JOBS + "resume_weights", start=start, checkpoint=tmp_path / "checkpoint-3", output=tmp_path, sizes=EP2
    )
    assert all("optimizer.pt cannot be spread over ranks" in message for message in found)


def test_another_model_is_refused(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, settings={"max_steps": 3})
    jobs.save_tiny(tmp_path / "other", num_hidden_layers=2)
    found = two_ranks.run(
        JOBS + "load_into_another_model",
        start=tmp_path / "other",
        checkpoint=tmp_path / "checkpoint-3",
        output=tmp_path / "out",
        sizes=EP2,
    )
    assert all("is of another model than this" in message and "model.layers.2" in message for message in found)
    damaged = tmp_path / "checkpoint-3" / "sharded" / "__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    found = two_ranks.run(
        JOBS + "load_into_another_model",
        start=start,
        checkpoint=tmp_path / "checkpoint-3",
        output=tmp_path / "out",
        sizes=EP2,
    )
    assert all("cannot be read" in message and "resume_from_checkpoint=PATH" in message for message in found)


def test_adapters_on_a_sharded_model(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    """Only what is trained is saved; the base model is as it was loaded."""
    whole = two_ranks.run(JOBS + "train_adapters", start=start, output=tmp_path, sizes=EP2)
    checkpoint = tmp_path / "checkpoint-3"
    resumed = two_ranks.run(JOBS + "train_adapters", start=start, output=tmp_path, sizes=EP2, resume=str(checkpoint))
    for (losses, adapters), (other_losses, other_adapters) in zip(resumed, whole, strict=True):
        assert losses == other_losses
        jobs.assert_same_tensors(adapters, other_adapters)
    with safe_open(checkpoint / "adapter_model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == len(resumed[0][1])
    assert not (checkpoint / "model.safetensors").exists()


def test_shards_in_several_blocks(two_ranks: RankPool, tmp_path: Path) -> None:
    """Torch alone would write rank 0's rows as rows 0 to 3."""
    found = two_ranks.run(JOBS + "save_and_load_strided", directory=tmp_path)
    assert [rank["own"] for rank in found] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for rank in found:
        assert not rank["is_one_block"]
        assert rank["whole"] == list(range(8))
