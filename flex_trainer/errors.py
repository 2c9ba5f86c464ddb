"""A user's mistake is one line on the terminal; anything else keeps its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 2


def is_user_mistake(error: BaseException) -> bool:
    """Whether `error` is a ValueError or OSError raised by our own code, rather than by a library below it.

    Our code raises ValueError only for what the user can mend, with a message that says how.
    """
    if not isinstance(error, (ValueError, OSError)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    # Started by `python -m flex_trainer.train`, our own module is called __main__; then its package tells.
    package = "" if trace is None else trace.tb_frame.f_globals.get("__package__") or ""
    return module.split(".")[0] == "flex_trainer" or package.split(".")[0] == "flex_trainer"


@contextmanager
def user_mistakes_as_one_line() -> Iterator[None]:
    """Print a user's mistake as one red line on stderr and exit with code 2; FLEX_TRACEBACK=1 shows where it was."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not is_user_mistake(error) or os.environ.get("FLEX_TRACEBACK") == "1":
            raise
        print_mistake(" ".join(str(error).split()))
        sys.exit(EXIT_CODE)


def print_mistake(message: str) -> None:
    """One line on stderr: red on a terminal, and named after the rank where there are several."""
    rank = f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    line = f"Error{rank}: {message}"
    print(f"\033[31m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr)
