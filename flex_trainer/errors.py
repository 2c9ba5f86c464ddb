"""A user's mistake is one line on the terminal; anything else keeps its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 2


class UserError(ValueError):
    """Something that the user can mend, said in one line: the value, what is wrong with it, what to change.

    Our code raises it on purpose; a plain ValueError, ours or a library's, is a defect and keeps its traceback.
    """


@contextmanager
def user_mistakes_as_one_line() -> Iterator[None]:
    """Print a user's mistake as one red line on stderr and exit with code 2; FLEX_TRACEBACK=1 shows where it was."""
    try:
        yield
    except UserError as error:
        if os.environ.get("FLEX_TRACEBACK") == "1":
            raise
        print_mistake(" ".join(str(error).split()))
        sys.exit(EXIT_CODE)


def print_mistake(message: str) -> None:
    """One line on stderr: red on a terminal, and named after the rank where there are several."""
    rank = f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    line = f"Error{rank}: {message}"
    print(f"\033[31m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr)


def one_line(error: BaseException) -> str:
    """All of a library's message on one line, for the user who has to act on it."""
    return " ".join(str(error).split()) or type(error).__name__
