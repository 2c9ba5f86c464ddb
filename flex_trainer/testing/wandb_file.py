"""Reads back what an offline Weights & Biases run wrote, so that tests see what a user would sync.

A `.wandb` file is a log of records in blocks of 32 KiB; the first block begins with the file's own header of 7 bytes.
A block is filled with chunks, each with a header of 7 bytes (4 of checksum, 2 of length, 1 of type); a record is one
full chunk, or a first, middle ones and a last. A block's last bytes are padding when no chunk header fits there. The
records are protocol buffers of the wandb package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True)
class WandbRun:
    """What a run file has in it."""

    history: list[dict[str, Any]] = field(default_factory=list)
    """Logged rows in order, by name."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Newest summary value by name."""
    alerts: list[str] = field(default_factory=list)
    """Texts of the alerts in order."""

    def rows_with(self, name: str) -> list[dict[str, Any]]:
        """The rows in which `name` was logged."""
        return [row for row in self.history if name in row]


def read_wandb_file(path: Path) -> WandbRun:
    """Read a finished run's `.wandb` file.

    Raises:
        ValueError: the file is not one, or is cut off.
    """
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")  # its classes are made at run time
    run = WandbRun()
    for data in _raw_records(path.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            run.history.append(_values(record.history.item))
        elif record.HasField("summary"):
            for name, value in _values(record.summary.update).items():
                is_part = isinstance(value, dict) and isinstance(run.summary.get(name), dict)
                run.summary[name] = run.summary[name] | value if is_part else value
        elif record.HasField("alert"):
            run.alerts.append(record.alert.text)
    return run


def _raw_records(content: bytes) -> Iterator[bytes]:
    if not content.startswith(b":W&B"):
        raise ValueError("not a Weights & Biases run file: it does not begin with ':W&B'")
    position = HEADER_BYTES
    parts: list[bytes] = []
    while position + HEADER_BYTES <= len(content):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < HEADER_BYTES:
            position += left_in_block
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        start = position + HEADER_BYTES
        chunk = content[start : start + length]
        if len(chunk) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            raise ValueError(f"the run file is cut off or damaged at byte {position}")
        parts.append(chunk)
        position = start + length
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []


def _values(items: Iterable[Any]) -> dict[str, Any]:
    # A value that is a mapping (a table, say) comes as one item per leaf, with the path to it as nested_key.
    values: dict[str, Any] = {}
    for item in items:
        *outer, leaf = [item.key] if item.key else item.nested_key
        target = values
        for name in outer:
            target = target.setdefault(name, {})
        target[leaf] = json.loads(item.value_json)
    return values
