"""Directories of checkpoints: which ones count, and what a run that died leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from flex_trainer.checkpoint.staging import (
    CheckpointError,
    CheckpointWriteError,
    Staging,
    check_checkpoint,
    last_checkpoint,
    recover,
)
from flex_trainer.errors import UserError


def _complete(path: Path, content: str = "{}") -> Path:
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(content)
    return path


def _stage(directory: Path, name: str, content: str) -> Staging:
    staging = Staging(directory, name)
    staging.begin(is_shared=True)
    (staging.staged / "trainer_state.json").write_text(content)
    return staging


def test_a_checkpoint_is_not_there_until_it_is_complete(tmp_path: Path) -> None:
    first = _complete(tmp_path / "checkpoint-3")
    staging = _stage(tmp_path, "checkpoint-6", "{}")
    assert last_checkpoint(tmp_path) == first
    assert get_last_checkpoint(str(tmp_path)) == str(first)  # other programs do not take it for one either
    staging.publish()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]


def test_one_of_the_same_name_is_replaced_whole(tmp_path: Path) -> None:
    earlier = _complete(tmp_path / "checkpoint-3", "old")
    (earlier / "rng_state_7.pth").touch()
    _stage(tmp_path, "checkpoint-3", "new").publish()
    files = sorted(path.name for path in (tmp_path / "checkpoint-3").iterdir())
    assert files == ["flex_manifest.json", "trainer_state.json"]
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_steps_are_numbers(tmp_path: Path) -> None:
    _complete(tmp_path / "checkpoint-9")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    _complete(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_what_a_trainer_left_that_died_while_saving_in_place_is_passed_over(tmp_path: Path) -> None:
    _complete(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "model.safetensors").touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_there_may_be_none(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    assert last_checkpoint(tmp_path / "nothing") is None
    recover(tmp_path / "nothing")


def test_a_run_that_died_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    _complete(tmp_path / "replaced-checkpoint-3", "old")
    _complete(tmp_path / "saving-checkpoint-3" / "checkpoint-3", "new")
    recover(tmp_path)
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_run_that_died_after_them_leaves_the_new_one(tmp_path: Path) -> None:
    _complete(tmp_path / "replaced-checkpoint-3", "old")
    _complete(tmp_path / "checkpoint-3", "new")
    recover(tmp_path)
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_what_others_keep_in_the_directory_stays(tmp_path: Path) -> None:
    for name in ("saving-checkpoint-6", "saving-money", "replaced-parts", "checkpoint-best", "runs"):
        (tmp_path / name).mkdir()
    recover(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-best",
        "replaced-parts",
        "runs",
        "saving-money",
    ]


@pytest.mark.parametrize("path", ["saving-checkpoint-6", "saving-checkpoint-6/checkpoint-6", "replaced-checkpoint-3"])
def test_an_incomplete_one_is_refused_by_name(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match=f"{path}.*was never completed; resume_from_checkpoint=True"):
        check_checkpoint(tmp_path / path, is_shared=False)


def test_a_failure_says_what_is_left(tmp_path: Path) -> None:
    _complete(tmp_path / "checkpoint-3")
    staging = Staging(tmp_path, "checkpoint-6")
    with pytest.raises(CheckpointWriteError) as caught, staging.together("the model"):
        raise OSError(28, "No space left on device")
    assert str(caught.value).startswith(
        "checkpoint-6 was not saved (the model; rank 0: OSError: [Errno 28] No space left on device). "
        f"The last complete one is {str(tmp_path / 'checkpoint-3')!r}."
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_a_defect_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    staging = Staging(tmp_path, "checkpoint-6")
    with pytest.raises(CheckpointError, match="rank 0: KeyError: 'x'") as caught, staging.together("the model"):
        raise KeyError("x")
    assert not isinstance(caught.value, UserError)


def test_an_output_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointWriteError, match="making its directory; rank 0: .*out.*There is no earlier one"):
        Staging(tmp_path / "out", "checkpoint-6").begin(is_shared=False)
