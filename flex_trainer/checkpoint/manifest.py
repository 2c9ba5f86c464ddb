"""What belongs to a checkpoint: the size and checksum of each of its files, in a file that is written last.

    {"files": {"trainer_state.json": {"bytes": 812, "crc32": 2774131690}, ...}, "crc32": 912731}

The checksum is CRC-32 of the standard library. It is to find damage, not forgery: it finds every damage of up to 32
neighbouring bits and all but one in 4 billion of the others, at 4.0 GB/s on one core of an EPYC (sha256 with the
processor's own instructions: 1.7, blake2b: 0.9). Files are written and read more slowly than that.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flex_trainer.files import write_whole

MANIFEST_FILE = "flex_manifest.json"
PLANNER_FILE = "flex_planner_{rank}.json"
"""What a rank's planner has learnt: hints, without which a run goes on as well."""
_PIECE_BYTES = 1 << 24
_OF_RANK = re.compile(r"(?:__|rng_state_|flex_planner_)(\d+)(?:_\d+)?\.(?:distcp|pth|json)")


class DamagedFileError(Exception):
    """A file of a checkpoint that is not what was written.

    Args:
        name: of the file, inside the checkpoint.
        reason: what is wrong with it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name


@dataclass(frozen=True)
class FileFacts:
    """What a file is recognized by."""

    num_bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Read a file through.

        Raises:
            OSError: it cannot be read.
        """
        crc32 = num_bytes = 0
        piece = memoryview(bytearray(_PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            while length := file.readinto(piece):
                crc32 = zlib.crc32(piece[:length], crc32)
                num_bytes += length
        return cls(num_bytes, crc32)


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, by their names inside of it."""

    files: Mapping[str, FileFacts]

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """None: there is none. Older versions of FlexTrainer, and Trainer, write none.

        Raises:
            DamagedFileError: it is not what was written.
        """
        path = directory / MANIFEST_FILE
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["crc32"] != _crc32_of(content["files"]):
                raise DamagedFileError(MANIFEST_FILE, "is not what was written (its checksum differs)")
            files = {name: FileFacts(facts["bytes"], facts["crc32"]) for name, facts in content["files"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedFileError(MANIFEST_FILE, f"cannot be read ({type(error).__name__}: {error})") from error
        return cls(files)

    def save(self, directory: Path) -> None:
        """Write it.

        Raises:
            ValueError: the system refuses to.
        """
        files = {name: {"bytes": of.num_bytes, "crc32": of.crc32} for name, of in sorted(self.files.items())}
        text = json.dumps({"files": files, "crc32": _crc32_of(files)}, indent=1)
        write_whole(directory / MANIFEST_FILE, text, "the checkpoint's manifest")

    def check_size(self, directory: Path, name: str) -> None:
        """Compare a file's size only.

        Raises:
            DamagedFileError: it is not there, or of another size.
        """
        path, facts = directory / name, self.files[name]
        if not path.is_file():
            raise DamagedFileError(name, "is missing")
        num_bytes = path.stat().st_size
        if num_bytes != facts.num_bytes:
            raise DamagedFileError(name, f"has {num_bytes} bytes where {facts.num_bytes} were written")

    def check(self, directory: Path, name: str) -> None:
        """Read a file through and compare it.

        Raises:
            DamagedFileError: it is not what was written.
        """
        self.check_size(directory, name)
        try:
            is_same = FileFacts.of(directory / name) == self.files[name]
        except OSError as error:
            raise DamagedFileError(name, f"cannot be read ({error.strerror or error})") from error
        if not is_same:
            raise DamagedFileError(name, "is not what was written (its checksum differs)")


def file_sizes(directory: Path) -> dict[str, int]:
    """All files of a checkpoint but the manifest: bytes, by name inside the directory."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
    return {name: num_bytes for name, num_bytes in sizes.items() if name != MANIFEST_FILE}


def is_hint(name: str) -> bool:
    """Whether a run goes on as well without the file."""
    return re.fullmatch(PLANNER_FILE.format(rank=r"\d+"), name) is not None


def writer_of(name: str) -> int | None:
    """The rank that has written a file of its own; None: one for all ranks."""
    found = _OF_RANK.fullmatch(Path(name).name)
    return None if found is None else int(found[1])


def shares(sizes: Mapping[str, int], members: Iterable[int]) -> dict[int, list[str]]:
    """Files by member, such that all have about the same number of bytes to read: the largest first, to the rank that
    has the least so far. Equal on all ranks."""
    given: dict[int, list[str]] = {member: [] for member in members}
    loads = dict.fromkeys(given, 0)
    for name, num_bytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        member = min(loads, key=lambda one: (loads[one], one))
        given[member].append(name)
        loads[member] += num_bytes
    return given


def _crc32_of(files: Any) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())
