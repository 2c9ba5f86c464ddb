"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from flex_trainer.errors import UserError


def write_whole(path: Path, text: str, what: str = "the file") -> Path:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    Args:
        path: missing directories above it are made.
        what: the content's name in the error message.

    Raises:
        ValueError: the file cannot be written (no permission, not a directory, a full disk).
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory: os.replace is atomic within one file system only.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp keeps a file to its owner
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise _cannot_be_written(path, what, error) from error
    return path


def check_writable(path: Path, what: str = "the file") -> None:
    """Find out now whether `write_whole` will be able to write to `path`, before the work that fills the file.

    Raises:
        ValueError: it will not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part"):
            pass
    except OSError as error:
        raise _cannot_be_written(path, what, error) from error


def check_can_be_made(path: Path, what: str = "the file") -> None:
    """As `check_writable`, but nothing is made, not even for a moment below a directory that is not there yet.

    Raises:
        ValueError: `write_whole` will not be able to write to `path`.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        there = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.NamedTemporaryFile(dir=there, prefix=".flex.", suffix=".part"):
            pass
    except OSError as error:
        raise _cannot_be_written(path, what, error) from error


def _cannot_be_written(path: Path, what: str, error: OSError) -> UserError:
    return UserError(
        f"{what} cannot be written to {str(path)!r}: {error.strerror or error}; "
        "choose a path in a writable directory with free space"
    )
