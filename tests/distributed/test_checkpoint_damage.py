"""Damaged checkpoints of sharded models: every rank says the same of a file that one of them has read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flex_trainer.checkpoint.manifest import MANIFEST_FILE
from flex_trainer.checkpoint.staging import check_checkpoint
from flex_trainer.checkpoint.verify import verify
from flex_trainer.errors import UserError
from flex_trainer.testing.ranks import RankPool
from tests.checkpoint.damage import WAYS, flip_a_bit, remove, truncate
from tests.distributed.checkpoint_jobs import EP2, JOBS
from tests.tiers import sweep_over

pytestmark = pytest.mark.ranks

SHARDS = ["sharded/__0_0.distcp", "sharded/__1_0.distcp", "sharded/.metadata", "sharded/optimizer_groups.pt"]
NEEDED = [*SHARDS, "scheduler.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", "model.safetensors"]


@pytest.fixture(scope="module")
def saved(two_ranks: RankPool, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks with two checkpoints."""
    output = tmp_path_factory.mktemp("saved")
    settings = {"max_steps": 2, "save_steps": 1}
    two_ranks.run(JOBS + "train", start=start, output=output, sizes=EP2, settings=settings)
    return output


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_all_files_are_in_the_manifest(saved: Path) -> None:
    directory = saved / "checkpoint-2"
    files = json.loads((directory / MANIFEST_FILE).read_text())["files"]
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert files.keys() == there - {MANIFEST_FILE}
    assert {*NEEDED} <= there
    assert verify(directory, is_shared=True) == ((), ())


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("way", sweep_over([*WAYS], quick=[next(iter(WAYS))]))
def test_every_damage_is_found(run: Path, name: str, way: str) -> None:
    WAYS[way](run / "checkpoint-2" / name)
    with pytest.raises(UserError, match=r"the last complete one is .*checkpoint-1'$") as caught:
        check_checkpoint(run / "checkpoint-2", is_shared=True)
    assert f"checkpoint-2' is damaged ({name} " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, remove) for name in NEEDED if "model" not in name]
    + [(name, truncate) for name in NEEDED]
    + [("sharded/optimizer_groups.pt", flip_a_bit)],
)
def test_what_is_found_without_a_manifest(run: Path, name: str, damage: Any) -> None:
    (run / "checkpoint-2" / MANIFEST_FILE).unlink()
    assert verify(run / "checkpoint-2", is_shared=True) == ((), ())
    damage(run / "checkpoint-2" / name)
    told = verify(run / "checkpoint-2", is_shared=True).damage
    assert any(text.startswith(f"{name} ") for text in told)


def test_ranks_share_the_reading_and_say_the_same(two_ranks: RankPool, run: Path) -> None:
    num_files = len(json.loads((run / "checkpoint-2" / MANIFEST_FILE).read_text())["files"])
    whole = two_ranks.run(JOBS + "find", output=run)
    assert [found for found, _, _ in whole] == ["checkpoint-2", "checkpoint-2"]
    assert sum(num_read for _, _, num_read in whole) == num_files  # each file once
    assert all(num_read > 0 for _, _, num_read in whole)
    for rank in (0, 1):  # one of them reads it
        flip_a_bit(run / "checkpoint-2" / f"rng_state_{rank}.pth")
        found = two_ranks.run(JOBS + "find", output=run)
        assert [name for name, _, _ in found] == ["checkpoint-1", "checkpoint-1"]
        assert f"rng_state_{rank}.pth is not what was written" in found[0][1]
        assert found[1][1] == ""  # one rank warns
    truncate(run / "checkpoint-1" / "sharded" / "__1_0.distcp")
    first, second = two_ranks.run(JOBS + "find", output=run)
    assert first[0] == second[0]
    assert first[0].startswith("No valid checkpoint found in output directory")
    assert "sharded/__1_0.distcp has" in first[0]
