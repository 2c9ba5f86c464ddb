"""The point at which a micro-batch waits for communication, and another one may run.

Every exchange of rows is started first and waited for here, in forward and in backward. Who runs two micro-batches at
once puts something else in place of `Waiting.wait`: hand over to the other, wait when resumed. It belongs to the
transport and not to a thread, since autograd runs the backward of a GPU in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Waiting(Protocol):
    """How a transport waits."""

    def wait(self, works: Sequence[Work]) -> None:
        """Return when all of the works are done."""
        ...


class WaitHere:
    """Nothing else runs meanwhile."""

    def wait(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait()
