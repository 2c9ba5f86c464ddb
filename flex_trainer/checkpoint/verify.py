"""Whether a checkpoint is whole: every file as it was written. The ranks share the reading.

With a manifest, every file is compared with it. Without one (of Trainer, or of an older version) there is what the
formats themselves tell: files that are cut off, those that are named in others and missing, the checksums in archives
of torch.save. A byte that was flipped in a shard or in safetensors cannot be found then.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from flex_trainer.checkpoint.groups import GROUPS_FILE
from flex_trainer.checkpoint.manifest import (
    DamagedFileError,
    FileFacts,
    Manifest,
    file_sizes,
    is_hint,
    shares,
    writer_of,
)
from flex_trainer.ranks import num_ranks, num_ranks_here, this_rank

SHARDED = "sharded"
"""The directory inside a checkpoint that holds what ranks wrote in parts."""
_METADATA = ".metadata"
_ARCHIVES = (".pt", ".pth", ".bin")
_T = TypeVar("_T")


class Findings(NamedTuple):
    """What is wrong with a checkpoint."""

    damage: tuple[str, ...]
    """Files that are needed, each with what is wrong; empty: the checkpoint is whole."""
    damaged_hints: tuple[str, ...]
    """The same of files that only help."""


def read_own_share(directory: Path, is_shared: bool) -> dict[str, FileFacts]:
    """Size and checksum of the files that this rank has written into a checkpoint, and of a share of those that one
    rank has written for all, which the ranks of its machine read together.

    Args:
        is_shared: whether all ranks write into one directory.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = file_sizes(directory)
    by_writer = {name: writer_of(name) for name in sizes}
    own = [name for name, writer in by_writer.items() if writer == this_rank()]
    common = {name: sizes[name] for name, writer in by_writer.items() if writer is None or writer >= num_ranks()}
    own += shares(common, _members(is_shared, of_first_machine=True)).get(this_rank(), [])
    return {name: FileFacts.of(directory / name) for name in own}


def seal(directory: Path, own_share: dict[str, FileFacts]) -> Manifest:
    """The manifest of what all ranks have read. All ranks must call this; nothing is written."""
    facts = own_share
    for others in _gather(own_share):
        facts = {**others, **facts}  # its own first: where machines have disks of their own, these are what is there
    return Manifest({name: of for name, of in facts.items() if (directory / name).is_file()})


def verify(directory: Path, is_shared: bool) -> Findings:
    """Read a checkpoint through, each rank a share of it. All ranks must call this, and hear the same.

    Args:
        is_shared: whether the ranks read one directory; else those of each machine verify what is on it.
    """
    try:
        own = _damage_of_own_share(directory, is_shared)
    except OSError as error:
        own = [DamagedFileError("the directory", f"cannot be read ({error.strerror or error})")]
    said = [(error.name, str(error)) for error in own]
    found = sorted({pair for of_rank in _gather(said) for pair in of_rank})
    return Findings(
        damage=tuple(text for name, text in found if not is_hint(name)),
        damaged_hints=tuple(text for name, text in found if is_hint(name)),
    )


def _damage_of_own_share(directory: Path, is_shared: bool) -> list[DamagedFileError]:
    if not directory.is_dir():
        return [DamagedFileError("the directory", "is not there")]
    damage: list[DamagedFileError] = []

    def attempt(check: Callable[[Path, str], None], name: str) -> None:
        try:
            check(directory, name)
        except DamagedFileError as error:
            damage.append(error)

    attempt(_check_state, TRAINER_STATE_NAME)
    try:
        manifest = Manifest.load(directory)
    except DamagedFileError as error:
        return [*damage, error]
    if manifest is not None:
        sizes, check = {name: of.num_bytes for name, of in manifest.files.items()}, manifest.check
    else:
        sizes, check = file_sizes(directory), _check_format
        damage += _missing(sizes)
    for name in shares(sizes, _members(is_shared)).get(this_rank(), []):
        attempt(check, name)
    return damage


def looks_whole(directory: Path) -> bool:
    """What can be said without reading: all files are there and of the right size. One process decides alone."""
    try:
        _check_state(directory, TRAINER_STATE_NAME)
        manifest = Manifest.load(directory)
        if manifest is not None:
            for name in manifest.files:
                if not is_hint(name):
                    manifest.check_size(directory, name)
    except DamagedFileError:
        return False
    return True


def _check_state(directory: Path, name: str) -> None:
    """The file that Trainer writes last: where it is missing, a Trainer that writes in place has died."""
    if not (directory / name).is_file():
        raise DamagedFileError(name, "is missing: the checkpoint was never completed")
    _check_json(directory, name)
    if not isinstance(json.loads((directory / name).read_text(encoding="utf-8")), dict):
        raise DamagedFileError(name, "is not what Trainer writes")


def _check_format(directory: Path, name: str) -> None:
    """What a file without a checksum tells of itself."""
    path = directory / name
    if path.suffix == ".json":
        _check_json(directory, name)
        if path.name == SAFE_WEIGHTS_INDEX_NAME:
            _check_index(path, name)
    elif path.suffix in _ARCHIVES:
        _check_archive(path, name)
    elif path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except Exception as error:  # the header may have become anything
            raise DamagedFileError(name, f"cannot be read ({type(error).__name__}: {error})") from error
    elif path.name == _METADATA:
        _check_shards(path.parent, name)


def _check_json(directory: Path, name: str) -> None:
    try:
        json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedFileError(name, f"cannot be read ({type(error).__name__}: {error})") from error


def _check_index(path: Path, name: str) -> None:
    """The files that an index of weights names."""
    weight_map = json.loads(path.read_text(encoding="utf-8")).get("weight_map", {})
    for part in sorted(set(weight_map.values())):
        if not (path.parent / part).is_file():
            raise DamagedFileError((Path(name).parent / part).as_posix(), "is missing")


def _check_archive(path: Path, name: str) -> None:
    """What torch.save has written: its present format has a directory at its end, and checksums."""
    try:
        with path.open("rb") as file:
            is_of_old_format = file.read(1) == b"\x80"
        if is_of_old_format:
            return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if torch.serialization.get_crc32_options() else None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedFileError(name, f"cannot be read ({type(error).__name__}: {error})") from error
    if damaged is not None:
        raise DamagedFileError(name, f"is not what was written (the checksum of {damaged} in it differs)")


def _check_shards(directory: Path, name: str) -> None:
    """The index of a distributed checkpoint, and that its parts reach as far as it says."""
    try:
        metadata = FileSystemReader(directory).read_metadata()
        ends: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedFileError(name, f"cannot be read ({type(error).__name__}: {error})") from error
    for part, end in ends.items():
        of_part = (Path(name).parent / part).as_posix()
        if not (directory / part).is_file():
            raise DamagedFileError(of_part, "is missing")
        if (directory / part).stat().st_size < end:
            raise DamagedFileError(of_part, f"has {(directory / part).stat().st_size} bytes where {end} were written")


def _missing(names: dict[str, int]) -> list[DamagedFileError]:
    """Files that must be there beside those that are, where no manifest says so."""
    needed: set[str] = set()
    if any(name.startswith(f"{SHARDED}/") for name in names):
        needed |= {f"{SHARDED}/{_METADATA}", f"{SHARDED}/{GROUPS_FILE}", SCHEDULER_NAME}
    if OPTIMIZER_NAME in names:
        needed.add(SCHEDULER_NAME)  # without it Trainer begins with a new optimizer
    writers = {rank for name in names if (rank := writer_of(name)) is not None}
    streams = {rank for rank in range(max(writers, default=-1) + 1) if f"rng_state_{rank}.pth" in names}
    if streams:
        needed |= {f"rng_state_{rank}.pth" for rank in range(max(writers) + 1)}
    return [DamagedFileError(name, "is missing") for name in sorted(needed - names.keys())]


def _members(is_shared: bool, of_first_machine: bool = False) -> range:
    """The ranks that share the reading of what this rank sees."""
    if num_ranks() == 1:
        return range(1)
    if is_shared:
        return range(num_ranks_here() if of_first_machine else num_ranks())
    first = this_rank() - int(os.environ.get("LOCAL_RANK", "0"))
    here = range(first, first + num_ranks_here())
    return here if this_rank() in here else range(this_rank(), this_rank() + 1)  # a launcher that does not say


def _gather(own: _T) -> list[_T]:
    """What each rank has, in their order."""
    if num_ranks() == 1:
        return [own]
    gathered: list[Any] = [None] * num_ranks()
    torch.distributed.all_gather_object(gathered, own)
    return gathered
