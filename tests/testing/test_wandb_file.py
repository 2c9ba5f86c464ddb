"""The reader of run files, on files made here: records longer than a block, padding, and damage."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flex_trainer.testing.wandb_file import BLOCK_BYTES, HEADER_BYTES, read_wandb_file


def alert(text: str) -> bytes:
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    record = protocol.Record()
    record.alert.text = text
    return record.SerializeToString()


def write_run_file(path: Path, records: list[bytes]) -> None:
    """Write `records` cut into chunks at the ends of blocks (the checksums are left out, they are not read here)."""
    content = bytearray(b":W&B" + bytes(3))
    for record in records:
        is_first = True
        while is_first or record:
            room = BLOCK_BYTES - len(content) % BLOCK_BYTES - HEADER_BYTES
            if room < 0:
                content += bytes(room + HEADER_BYTES)
                continue
            chunk, record = record[:room], record[room:]
            kind = (1 if is_first else 4) if not record else (2 if is_first else 3)
            content += bytes(4) + len(chunk).to_bytes(2, "little") + bytes([kind]) + chunk
            is_first = False
    path.write_bytes(content)


def test_records_over_several_blocks(tmp_path: Path):
    texts = ["short", "a" * 100_000, "end"]
    write_run_file(tmp_path / "run.wandb", [alert(text) for text in texts])
    assert read_wandb_file(tmp_path / "run.wandb").alerts == texts


@pytest.mark.parametrize("room", range(HEADER_BYTES + 3))
def test_the_end_of_a_block(tmp_path: Path, room: int):
    # The first record ends `room` bytes before the block does: too few for a header, just enough, or a little more.
    overhead = len(alert("a" * 30_000)) - 30_000
    text = "a" * (BLOCK_BYTES - 2 * HEADER_BYTES - overhead - room)
    write_run_file(tmp_path / "run.wandb", [alert(text), alert("next")])
    assert read_wandb_file(tmp_path / "run.wandb").alerts == [text, "next"]


def test_a_file_that_is_cut_off(tmp_path: Path):
    path = tmp_path / "run.wandb"
    write_run_file(path, [alert("whole"), alert("cut" * 10)])
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cut off"):
        read_wandb_file(path)


def test_another_kind_of_file(tmp_path: Path):
    (tmp_path / "run.wandb").write_text("hello")
    with pytest.raises(ValueError, match="not a Weights & Biases run file"):
        read_wandb_file(tmp_path / "run.wandb")
