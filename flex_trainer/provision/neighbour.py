"""What may run beside a forward: the backward of the micro-batch before it (steps/fused.py), or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from flex_trainer.provision.micro_batch import MicroBatch


class Neighbour(Protocol):
    """Runs beside forwards."""

    def beside(self, start: Callable[[], MicroBatch]) -> AbstractContextManager[MicroBatch]:
        """A context for the model's forward, and the micro-batch that `start` has begun. What runs beside it has ended
        with it."""
        ...

    def settle(self) -> None:
        """Run what waits for a forward now: something begins that nothing may run beside."""
        ...


class Nobody:
    """A forward runs by itself."""

    @contextmanager
    def beside(self, start: Callable[[], MicroBatch]) -> Iterator[MicroBatch]:
        yield start()

    def settle(self) -> None:
        pass
