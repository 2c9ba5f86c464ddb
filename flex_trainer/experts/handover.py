"""The point at which a micro-batch waits for communication, and another one may run.

Every exchange of rows is started first and waited for here, in forward and in backward. Who runs two micro-batches at
once puts something else in place of `Waiting`: hand over to the other, wait when resumed. It belongs to the
transport and not to a thread, since autograd runs the backward of a GPU in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Exchange(Enum):
    """What the ranks exchange. The backward of a dispatch is a combine, and the other way round."""

    COUNTS = "counts"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    GATHER = "gather"
    """Weights of a unit of FSDP2."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Waiting(Protocol):
    """How a transport waits."""

    def wait(self, works: Sequence[Work], exchange: Exchange) -> None:
        """Return when all of the works are done."""
        ...

    def sequence(self) -> int:
        """A number that stands for all exchanges so far, in their order; 0 where nobody counts. Ranks that exchange
        rows have the same one."""
        ...


class WaitHere:
    """Nothing else runs meanwhile."""

    def wait(self, works: Sequence[Work], exchange: Exchange) -> None:
        for work in works:
            work.wait()

    def sequence(self) -> int:
        return 0
