"""The points at which a micro-batch waits for communication, and another one may run.

Every exchange of rows is started first and waited for here. Who runs two micro-batches at once (a forward beside a
backward) replaces the wait of its threads: hand over to the other, wait when resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


Wait = Callable[[Sequence[Work]], None]
"""Returns when all of the works are done."""

_thread = threading.local()


def wait_for(works: Sequence[Work]) -> None:
    """Wait for collectives that have been started, as this thread does it."""
    waits: Wait = getattr(_thread, "wait", _wait_here)
    waits(works)


@contextmanager
def waiting_with(wait: Wait) -> Iterator[None]:
    """Have this thread wait with `wait` inside."""
    outer = getattr(_thread, "wait", _wait_here)
    _thread.wait = wait
    try:
        yield
    finally:
        _thread.wait = outer


def _wait_here(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
