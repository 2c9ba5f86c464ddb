"""Files are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flex_trainer.errors import UserError
from flex_trainer.files import check_writable, write_whole


def test_replaces_and_makes_directories(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    assert write_whole(path, "one") == path
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["b.txt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.txt"
    path.write_text("old")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(ValueError, match="the result cannot be written to .*: No space left on device"):
        write_whole(path, "new", "the result")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["b.txt"]


def test_what_cannot_be_written_is_found_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "plan.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "new", tmp_path / "file" / "plan.json"):
        with pytest.raises(UserError, match=r"^the plan cannot be written to .*: .*; choose a path"):
            check_writable(path, "the plan")
