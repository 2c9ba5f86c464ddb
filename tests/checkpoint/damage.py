"""Ways in which files of a checkpoint are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2 * len(content) // 3] ^= 4
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


WAYS: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": empty,
    "one bit flipped": flip_a_bit,
    "missing": remove,
}
