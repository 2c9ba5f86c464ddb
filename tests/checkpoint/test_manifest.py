"""Sizes and checksums of files, and who reads which."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from flex_trainer.checkpoint import manifest as module
from flex_trainer.checkpoint.manifest import (
    MANIFEST_FILE,
    DamagedFileError,
    FileFacts,
    Manifest,
    file_sizes,
    is_hint,
    shares,
    writer_of,
)
from tests.checkpoint.damage import WAYS


def test_a_file_is_read_through_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 10
    (tmp_path / "file").write_bytes(content)
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    assert FileFacts.of(tmp_path / "file") == FileFacts(2560, zlib.crc32(content))


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = Manifest({"sharded/.metadata": FileFacts(3, 7), "scheduler.pt": FileFacts(2, 4_000_000_000)})
    written.save(tmp_path)
    assert Manifest.load(tmp_path) == written
    assert file_sizes(tmp_path) == {}  # it is not a part of what it describes


def test_there_may_be_none(tmp_path: Path) -> None:
    assert Manifest.load(tmp_path) is None


@pytest.mark.parametrize("way", ["truncated", "empty", "one bit flipped"])
def test_damage_of_its_own_is_not_blamed_on_others(tmp_path: Path, way: str) -> None:
    Manifest({f"file{number}": FileFacts(number, number) for number in range(9)}).save(tmp_path)
    WAYS[way](tmp_path / MANIFEST_FILE)
    with pytest.raises(DamagedFileError, match=MANIFEST_FILE):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": 3, "crc32": 1}', '{"files": {"a": 1}, "crc32": 3}'])
def test_another_file_of_that_name(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(DamagedFileError, match=MANIFEST_FILE):
        Manifest.load(tmp_path)


def test_who_has_written_a_file() -> None:
    assert writer_of("sharded/__12_0.distcp") == 12
    assert writer_of("rng_state_3.pth") == 3
    assert writer_of("flex_planner_0.json") == 0
    assert writer_of("pytorch_model_fsdp_0/__1_2.distcp") == 1
    for common in ("rng_state.pth", "sharded/.metadata", "model-00001-of-00002.safetensors", "trainer_state.json"):
        assert writer_of(common) is None
    assert is_hint("flex_planner_11.json")
    assert not is_hint("trainer_state.json") and not is_hint("flex_planner_x.json")


def test_shares_are_of_about_one_size() -> None:
    sizes = {"a": 8, "b": 5, "c": 4, "d": 1, "e": 0}
    assert shares(sizes, range(2)) == {0: ["a", "d", "e"], 1: ["b", "c"]}
    assert shares(sizes, [3]) == {3: ["a", "b", "c", "d", "e"]}
    assert shares({}, range(2)) == {0: [], 1: []}
