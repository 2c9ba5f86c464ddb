"""Allocations that fail where a test wants them to, with the error of torch's CPU allocator.

    failing = FailingAllocations(runtime, "recovery", numbers={7})
    with failing:
        step()                      # the 8th operation inside a recovery finds no memory

Counting runs over all the times that the object is entered; a step that is run again counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from flex_trainer.runtime import FlexRuntime

PLACES = ("forward", "backward", "recovery", "offload")
ASKED_BYTES = 100_000
"""What the failed allocations say that they asked for."""
TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    f"{ASKED_BYTES} bytes. Error code 12 (Cannot allocate memory)"
)


class FailingAllocations(TorchDispatchMode):
    """Lets operations fail by their number, counted from 0 among those of one place.

    Args:
        runtime: whose engine tells forward, backward and recovery apart.
        where: one of `PLACES`; in "offload", writes to and reads from the lower tier are counted, not operations.
        numbers: those that fail; none to only count.
    """

    def __init__(self, runtime: FlexRuntime, where: str, numbers: Collection[int] = ()) -> None:
        super().__init__()
        self.runtime = runtime
        self.where = where
        self.numbers = frozenset(numbers)
        self.num_seen = 0
        self.num_failed = 0
        self._tier: Any = None

    def __enter__(self) -> FailingAllocations:
        if self.where == "offload":
            self._wrap_tier()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self.runtime.place
        if place is not None and place.phase == self.where:
            self._count()
        return func(*args, **(kwargs or {}))

    def _wrap_tier(self) -> None:
        tier: Any = self.runtime.books.offloading.store().tier
        if tier is self._tier:
            return
        self._tier = tier
        for name in ("write", "read"):
            setattr(tier, name, self._counted(getattr(tier, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._count()
            return function(*args)

        return counted

    def _count(self) -> None:
        number = self.num_seen
        self.num_seen += 1
        if number in self.numbers:
            self.num_failed += 1
            raise RuntimeError(TEXT)
