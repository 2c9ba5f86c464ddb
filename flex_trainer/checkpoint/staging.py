"""A checkpoint gets its name when all of it is written, on all ranks: a run that dies in between leaves the last one.

output_dir/
  checkpoint-3/                        complete
  saving-checkpoint-6/checkpoint-6/    being written, or left by a run that died; no name that a Trainer looks for
  replaced-checkpoint-3/               an earlier checkpoint of that name, until the new one is in its place
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from flex_trainer.checkpoint.failures import gather_failures, in_words
from flex_trainer.checkpoint.manifest import FileFacts
from flex_trainer.checkpoint.verify import Findings, looks_whole, read_own_share, seal, verify
from flex_trainer.errors import UserError
from flex_trainer.ranks import is_first_on_machine, num_ranks, this_rank

_SAVING = "saving-"
_REPLACED = "replaced-"
_MOST_NAMED = 3
"""Damaged files in one message."""
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint was not saved. Every rank raises this; the message says which rank failed, and how."""


class CheckpointWriteError(CheckpointError, UserError):
    """A checkpoint was not saved since the system refused to write: a full disk, say."""


class Staging:
    """One checkpoint while it is written. All ranks make one, and call the same methods in the same order.

    Args:
        run_directory: where the checkpoint will be.
        name: the checkpoint's name, `checkpoint-6`.
    """

    def __init__(self, run_directory: Path, name: str) -> None:
        self.name = name
        self.final = run_directory / name
        self.directory = run_directory / f"{_SAVING}{name}"
        """Stands in for the run's directory meanwhile."""
        self.staged = self.directory / name
        self._is_shared = False

    def begin(self, is_shared: bool) -> None:
        """Make the directory, without what an earlier run has left there.

        Args:
            is_shared: whether all ranks write into one directory, so that all of them must see it.

        Raises:
            CheckpointError: on every rank, if a rank failed.
        """
        self._is_shared = is_shared
        with self.together("removing left-overs"):  # all of it, before any rank makes a new directory
            if is_first_on_machine():
                sweep(self.final.parent)
        with self.together("making its directory"):
            if is_first_on_machine():
                self.staged.mkdir(parents=True, exist_ok=True)
        with self.together("looking for its directory"):
            if is_shared and not self.staged.is_dir():
                raise FileNotFoundError(
                    f"{str(self.staged)!r}, made on rank 0's machine, is not there; choose an output_dir on a file "
                    "system that all machines share"
                )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Each rank does its part inside, without waiting for others; then all go on, or all raise.

        Raises:
            CheckpointError: on every rank, if any rank raised inside; not where this is what was raised.
        """
        error: BaseException | None = None
        try:
            yield
        except CheckpointError:
            raise  # on all ranks alike
        except (Exception, CheckpointException) as raised:
            error = raised
        failures = gather_failures(error)
        if failures:
            is_refused = all(failure.is_refused_by_system for failure in failures.values())
            kind = CheckpointWriteError if is_refused else CheckpointError
            raise kind(f"{self.name} was not saved ({what}; {in_words(failures)}). {self._what_is_left()}") from error

    def publish(self) -> None:
        """Write the manifest, then give the checkpoint its name, in the place of an earlier one of that name.

        Raises:
            CheckpointError: on every rank, if a rank failed.
        """
        facts: dict[str, FileFacts] = {}
        with self.together("reading it for the manifest"):
            facts = read_own_share(self.staged, self._is_shared)
        manifest = seal(self.staged, facts)
        with self.together("the manifest"):
            if self.staged.is_dir() and (this_rank() == 0 if self._is_shared else is_first_on_machine()):
                manifest.save(self.staged)
        with self.together("flushing it to disk"):
            if is_first_on_machine() and self.staged.is_dir():
                _flush(self.staged)
        with self.together("renaming it"):
            if this_rank() == 0:
                self._rename()
        if num_ranks() > 1 and not self._is_shared:
            with self.together("renaming it"):
                # On machines with a disk of their own: what their ranks wrote there.
                if is_first_on_machine() and this_rank() != 0 and self.staged.is_dir():
                    self._rename()

    def discard(self) -> None:
        """Remove what has been written so far: on a full disk it is in the way."""
        if is_first_on_machine():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _rename(self) -> None:
        replaced = self.final.parent / f"{_REPLACED}{self.name}"
        if self.final.exists():
            self.final.rename(replaced)
        try:
            self.staged.rename(self.final)
        except OSError:
            if replaced.exists():
                replaced.rename(self.final)
            raise
        _flush_one(self.final.parent)  # before the earlier one is removed
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _what_is_left(self) -> str:
        last = last_checkpoint(self.final.parent)
        left = f"The last complete one is {str(last)!r}" if last is not None else "There is no earlier one"
        return f"{left}. Free space or mend the above, then go on with train(resume_from_checkpoint=True)."


def last_checkpoint(run_directory: Path) -> Path | None:
    """The latest checkpoint whose files are all there and of the size they had; None: there is none.

    Their content is not read: `find_checkpoint` does that.
    """
    return next((path for path in checkpoints(run_directory) if looks_whole(path)), None)


def checkpoints(run_directory: Path) -> list[Path]:
    """All that have a checkpoint's name, complete or not, the latest step first."""
    if not run_directory.is_dir():
        return []
    steps = {int(name[1]): path for path in run_directory.iterdir() if (name := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def sweep(run_directory: Path) -> None:
    """Remove what runs have left that died while saving; a checkpoint about to be replaced gets its name back."""
    if not run_directory.is_dir():
        return
    for path in list(run_directory.iterdir()):
        if path.name.startswith(_REPLACED) and _NAME.fullmatch(path.name.removeprefix(_REPLACED)):
            final = run_directory / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):  # another machine that sees this directory was faster
                    path.rename(final)
        elif path.name.startswith(_SAVING) and _NAME.fullmatch(path.name.removeprefix(_SAVING)):
            shutil.rmtree(path, ignore_errors=True)


def recover(run_directory: Path) -> None:
    """Before a checkpoint is looked for: give one that was about to be replaced its name back. All ranks call this."""
    error: OSError | None = None
    if is_first_on_machine():
        try:
            sweep(run_directory)
        except OSError as raised:
            error = raised
    failures = gather_failures(error)
    if failures:
        raise UserError(f"{str(run_directory)!r} cannot be searched for checkpoints ({in_words(failures)})") from error


def find_checkpoint(run_directory: Path, is_shared: bool) -> tuple[Path, Findings]:
    """The checkpoint of the latest step that is whole. All ranks must call this; each reads a share of the files.

    Args:
        is_shared: whether the ranks read one directory.

    Raises:
        ValueError: there is none; with what was found instead.
    """
    passed_over = []
    for path in _agreed(checkpoints(run_directory)):
        findings = verify(path, is_shared)
        if not findings.damage:
            if passed_over:
                _warn(f"Going on from {str(path)!r}, the last complete checkpoint: {'; '.join(passed_over)}")
            return path, findings
        passed_over.append(f"{path.name} is damaged ({_in_words(findings.damage)})")
    found = f": {'; '.join(passed_over)}" if passed_over else ""
    raise UserError(
        f"No valid checkpoint found in output directory ({run_directory}){found}. Leave resume_from_checkpoint out to "
        "begin anew"
    )


def check_checkpoint(path: Path, is_shared: bool) -> Findings:
    """Refuse what cannot be resumed from, naming what can. All ranks must call this; each reads a share of the files.

    Raises:
        ValueError: left by a run that died while it saved, or damaged.
    """
    asked = f"resume_from_checkpoint={str(path)!r}"
    is_staged = any(
        part.startswith((_SAVING, _REPLACED)) and _NAME.search(part) for part in (path.name, path.parent.name)
    )
    if is_staged:
        raise UserError(f"{asked} was never completed; resume_from_checkpoint=True takes the last one that was")
    findings = verify(path, is_shared)
    if findings.damage:
        others = (one for one in _agreed(checkpoints(path.parent)) if one != path)
        whole = next((one for one in others if not verify(one, is_shared).damage), None)
        left = "there is no complete one beside it" if whole is None else f"the last complete one is {str(whole)!r}"
        raise UserError(f"{asked} is damaged ({_in_words(findings.damage)}); {left}")
    return findings


def _agreed(paths: list[Path]) -> list[Path]:
    """What the first rank sees: where machines have disks of their own, all look at the same."""
    if num_ranks() == 1:
        return paths
    said: list[list[Path]] = [paths]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]


def _in_words(damage: Sequence[str]) -> str:
    more = len(damage) - _MOST_NAMED
    return ", ".join(damage[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _warn(text: str) -> None:
    if this_rank() == 0:
        warnings.warn(text, stacklevel=2)


def _flush(directory: Path) -> None:
    """Have the system write to disk what it only remembers: an error in that comes out here, not after the rename."""
    for path in (*directory.rglob("*"), directory):
        _flush_one(path)


def _flush_one(path: Path) -> None:
    """A file's content, or a directory's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
