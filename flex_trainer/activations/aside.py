"""What a recomputation changes for the whole process, and how it is put aside while another micro-batch runs.

A recomputation runs in the state of the first run: random streams, kernels allowed for attention, attributes of its
module. Where it waits for an exchange between ranks, another thread may run a forward meanwhile, which must find none
of that, and whose own draws and attributes must not be rolled back when the recomputation ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_thread = threading.local()  # .changes: of the recomputations that run on this thread, innermost last


class Change(Protocol):
    """A change of the process's state that lasts for a while."""

    def put_aside(self) -> None:
        """Give the process the state that it had before; keep the one that it has now."""
        ...

    def take_up(self) -> None:
        """Go on from where `put_aside` left off; what the process has by now is what it gets back in the end."""
        ...


@contextmanager
def changing(change: Change | None) -> Iterator[None]:
    """Around a change. None: one that cannot be put aside, so nobody else may run while it lasts."""
    changes = _changes()
    changes.append(change)
    try:
        yield
    finally:
        changes.pop()


def is_recomputing() -> bool:
    """Whether a recomputation runs on this thread."""
    return bool(_changes())


def may_hand_over() -> bool:
    """Whether another thread may run now."""
    return None not in _changes()


@contextmanager
def changes_aside() -> Iterator[None]:
    """Another thread runs inside. See `may_hand_over`."""
    changes = [change for change in _changes() if change is not None]
    for change in reversed(changes):
        change.put_aside()
    try:
        yield
    finally:  # also where the other one has failed: what ends then puts back what the process has by now
        for change in changes:
            change.take_up()


def _changes() -> list[Change | None]:
    changes: list[Change | None] | None = getattr(_thread, "changes", None)
    if changes is None:
        changes = _thread.changes = []
    return changes
