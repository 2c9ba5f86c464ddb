"""Damaged checkpoints are found before anything is loaded, and the message names the file and what is whole."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.checkpoint import last_checkpoint
from flex_trainer.checkpoint.manifest import MANIFEST_FILE
from flex_trainer.checkpoint.staging import check_checkpoint, find_checkpoint
from flex_trainer.checkpoint.verify import looks_whole, verify
from flex_trainer.errors import UserError
from tests.checkpoint.damage import WAYS, empty, flip_a_bit, remove, truncate
from tests.distributed import checkpoint_jobs as jobs
from tests.tiers import first_quick

NEEDED = ["scheduler.pt", "optimizer.pt", "trainer_state.json", "rng_state.pth", "model.safetensors", "config.json"]
FLEX = FlexConfig(memory_limit="8GiB", trace=False)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    jobs.save_tiny(directory)
    return directory


@pytest.fixture(scope="module")
def managed(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FlexTrainer with two checkpoints."""
    output = tmp_path_factory.mktemp("managed")
    _trainer(start, output, FlexTrainer, flex=FLEX).train()
    return output


@pytest.fixture(scope="module")
def plain(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of transformers' Trainer."""
    output = tmp_path_factory.mktemp("plain")
    _trainer(start, output, Trainer).train()
    return output


def _trainer(start: Path, output: Path, trainer_class: Any, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(start)
    return jobs.make_trainer(model, output, trainer_class, **{"max_steps": 2, "save_steps": 1, **settings})


def _copy(run: Path, output: Path) -> Path:
    return Path(shutil.copytree(run, output / "run"))


def test_a_whole_one_is_whole(managed: Path) -> None:
    for path in managed.iterdir():
        assert verify(path, is_shared=False) == ((), ())
    assert find_checkpoint(managed, is_shared=False)[0] == managed / "checkpoint-2"
    files = json.loads((managed / "checkpoint-2" / MANIFEST_FILE).read_text())["files"]
    found = {path.name for path in (managed / "checkpoint-2").iterdir()}
    assert files.keys() == found - {MANIFEST_FILE}
    assert {*NEEDED, "flex_planner_0.json"} <= files.keys()


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("way", WAYS)
def test_every_damage_names_the_file_and_the_last_whole_one(managed: Path, tmp_path: Path, name: str, way: str) -> None:
    run = _copy(managed, tmp_path)
    WAYS[way](run / "checkpoint-2" / name)
    with pytest.raises(UserError) as caught:
        check_checkpoint(run / "checkpoint-2", is_shared=False)
    message = str(caught.value)
    assert message.startswith(f"resume_from_checkpoint={str(run / 'checkpoint-2')!r} is damaged ({name} ")
    assert message.endswith(f"the last complete one is {str(run / 'checkpoint-1')!r}")
    assert "\n" not in message and message.count(name) <= 2
    with pytest.warns(UserWarning, match=rf"checkpoint-1.*checkpoint-2 is damaged \({name}"):
        assert find_checkpoint(run, is_shared=False)[0] == run / "checkpoint-1"
    is_seen_without_reading = way in ("truncated", "empty", "missing")
    assert looks_whole(run / "checkpoint-2") != is_seen_without_reading or name == "trainer_state.json"


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in ("scheduler.pt", "optimizer.pt", "rng_state.pth") for damage in (truncate, flip_a_bit)]
    + [("scheduler.pt", remove), ("scheduler.pt", empty), ("trainer_state.json", empty), ("trainer_state.json", remove)]
    + [("model.safetensors", truncate), ("model.safetensors", empty), ("config.json", truncate)],
)
def test_what_is_found_without_a_manifest(plain: Path, tmp_path: Path, name: str, damage: Any) -> None:
    """Checkpoints of Trainer, and of older versions."""
    run = _copy(plain, tmp_path)
    assert not (run / "checkpoint-2" / MANIFEST_FILE).exists()
    assert verify(run / "checkpoint-2", is_shared=False) == ((), ())
    damage(run / "checkpoint-2" / name)
    with pytest.raises(UserError, match=rf"is damaged \({name} .*the last complete one is .*checkpoint-1"):
        check_checkpoint(run / "checkpoint-2", is_shared=False)


def test_weights_in_parts_without_a_manifest(start: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(start).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "trainer_state.json").write_text("{}")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 2 and not verify(tmp_path, is_shared=False).damage
    parts[1].unlink()
    assert verify(tmp_path, is_shared=False).damage == (f"{parts[1].name} is missing",)


def test_a_stream_of_a_rank_that_is_missing_without_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    for rank in (0, 2):
        torch.save({}, tmp_path / f"rng_state_{rank}.pth")
    assert verify(tmp_path, is_shared=False).damage == ("rng_state_1.pth is missing",)


def test_archives_of_the_old_format_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    torch.save({"a": torch.ones(3)}, tmp_path / "scheduler.pt", _use_new_zipfile_serialization=False)
    assert not verify(tmp_path, is_shared=False).damage


def test_a_damaged_manifest_is_named_itself(managed: Path, tmp_path: Path) -> None:
    run = _copy(managed, tmp_path)
    truncate(run / "checkpoint-2" / MANIFEST_FILE)
    with pytest.raises(UserError, match=rf"is damaged \({MANIFEST_FILE} cannot be read"):
        check_checkpoint(run / "checkpoint-2", is_shared=False)
    assert last_checkpoint(run) == run / "checkpoint-1"


def test_where_none_is_whole(managed: Path, tmp_path: Path) -> None:
    run = _copy(managed, tmp_path)
    empty(run / "checkpoint-2" / "trainer_state.json")
    remove(run / "checkpoint-1" / "scheduler.pt")
    with pytest.raises(UserError, match="there is no complete one beside it"):
        check_checkpoint(run / "checkpoint-2", is_shared=False)
    with pytest.raises(
        UserError, match="No valid checkpoint found.*-2 is damaged.*-1 is damaged.*scheduler.pt is missing"
    ):
        find_checkpoint(run, is_shared=False)


def test_a_directory_that_is_no_checkpoint(start: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trainer_state.json is missing: the checkpoint was never completed"):
        check_checkpoint(start, is_shared=False)
    with pytest.raises(UserError, match="the directory is not there"):
        check_checkpoint(tmp_path / "nothing", is_shared=False)


def test_training_goes_on_from_the_last_whole_one(start: Path, managed: Path, tmp_path: Path) -> None:
    run = _copy(managed, tmp_path)
    empty(run / "checkpoint-2" / "trainer_state.json")
    trainer = _trainer(start, run, FlexTrainer, flex=FLEX)
    with pytest.warns(UserWarning, match=r"Going on from .*checkpoint-1.*trainer_state.json cannot be read"):
        trainer.train(resume_from_checkpoint=True)
    whole = json.loads((managed / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    resumed = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    assert not verify(run / "checkpoint-2", is_shared=False).damage  # written anew


def test_only_an_incomplete_one(start: Path, managed: Path, tmp_path: Path) -> None:
    """As where there is none: a ValueError, which says what there is."""
    run = _copy(managed, tmp_path)
    shutil.rmtree(run / "checkpoint-1")
    remove(run / "checkpoint-2" / "trainer_state.json")
    with pytest.raises(ValueError, match=r"No valid checkpoint found.*checkpoint-2 .*trainer_state.json is missing"):
        _trainer(start, run, FlexTrainer, flex=FLEX).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_to_a_damaged_one(start: Path, managed: Path, tmp_path: Path, kind: Any) -> None:
    run = _copy(managed, tmp_path)
    flip_a_bit(run / "checkpoint-2" / "model.safetensors")
    with pytest.raises(UserError, match=r"is damaged \(model.safetensors is not what was written"):
        _trainer(start, run, FlexTrainer, flex=FLEX).train(resume_from_checkpoint=kind(run / "checkpoint-2"))


@pytest.mark.parametrize("way", first_quick([*WAYS], 2))
def test_hints_never_stop_a_resume(start: Path, managed: Path, tmp_path: Path, way: str) -> None:
    run = _copy(managed, tmp_path)
    WAYS[way](run / "checkpoint-2" / "flex_planner_0.json")
    trainer = _trainer(start, run, FlexTrainer, flex=FLEX, max_steps=3)
    with pytest.warns(UserWarning, match="resumed without what the planner had learnt: flex_planner_0.json") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert len([one for one in caught if "planner" in str(one.message)]) == 1
    assert trainer.state.global_step == 3
    assert trainer.flex.records[0].is_profile  # learnt anew


@pytest.mark.parametrize("way", ["truncated", "empty"])
def test_hints_of_a_checkpoint_without_a_manifest(start: Path, managed: Path, tmp_path: Path, way: str) -> None:
    run = _copy(managed, tmp_path)
    (run / "checkpoint-2" / MANIFEST_FILE).unlink()
    WAYS[way](run / "checkpoint-2" / "flex_planner_0.json")
    trainer = _trainer(start, run, FlexTrainer, flex=FLEX, max_steps=3)
    with pytest.warns(UserWarning, match="resumed without"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_hints_in_another_format(start: Path, managed: Path, tmp_path: Path) -> None:
    """Whole, but of another version."""
    run = _copy(managed, tmp_path)
    (run / "checkpoint-2" / MANIFEST_FILE).unlink()
    path = run / "checkpoint-2" / "flex_planner_0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    trainer = _trainer(start, run, FlexTrainer, flex=FLEX, max_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_a_best_model_that_is_damaged(start: Path, tmp_path: Path) -> None:
    trainer = _trainer(start, tmp_path, FlexTrainer, flex=FLEX, **{**jobs.KEEP_THE_WORST, "eval_steps": 1})
    trainer.train()
    flip_a_bit(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    with pytest.raises(UserError, match=r"best model cannot be loaded: .*is damaged \(model.safetensors"):
        trainer._load_best_model()
