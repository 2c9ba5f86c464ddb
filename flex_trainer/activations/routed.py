"""What routers inside a recomputed region gave in its first run: a routing decision is never made twice.

In the recomputation a router runs again, for the rest of what autograd saves in it, and then gives what it gave before
(`as_routed`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flex_trainer.activations.leaves import mapped, tensors_of
from flex_trainer.activations.packed_leaf import PackedLeaf, recovered
from flex_trainer.activations.values import Packed

_thread = threading.local()  # .results: of the recomputation that runs on this thread, by router


class Routed:
    """The results of one region's routers, by site name, in the order of their runs."""

    __slots__ = ("_results", "_versions")

    def __init__(self) -> None:
        self._results: dict[str, list[Any]] = defaultdict(list)
        self._versions: list[tuple[torch.Tensor, int]] = []  # of the tensors among them, in the first run

    def note(self, router: str, result: Any, pack: Callable[[torch.Tensor], Packed]) -> None:
        """A router has given this in the first run.

        Args:
            pack: turns a tensor into a packed value.
        """
        self._versions += [(tensor, tensor._version) for tensor in tensors_of((result,), {})]
        self._results[router].append(
            mapped(lambda leaf: PackedLeaf(leaf, pack) if isinstance(leaf, torch.Tensor) else leaf, result)
        )

    def end_first_run(self) -> None:
        """The first run has ended, or failed."""
        if any(tensor._version != version for tensor, version in self._versions):
            # Code around the router has written into its results: a recomputation lets it decide again.
            self._results.clear()
        self._versions.clear()  # their graphs hold the region: neither would ever be freed

    def recovered(self) -> dict[str, Iterator[Any]]:
        """The results with their tensors, to be given once."""
        return {router: iter([recovered(one) for one in results]) for router, results in self._results.items()}


@contextmanager
def routing_is(results: Mapping[str, Iterator[Any]]) -> Iterator[None]:
    """Inside, routers on this thread give these results: for a recomputation."""
    outer = getattr(_thread, "results", None)
    _thread.results = results
    try:
        yield
    finally:
        _thread.results = outer


def as_routed(router: str, result: Any) -> Any:
    """What a router gives that has just run: in a recomputation, what it gave in the first run.

    Raises:
        RuntimeError: it runs more often than it did then.
    """
    results: Mapping[str, Iterator[Any]] | None = getattr(_thread, "results", None)
    if results is None or router not in results:
        return result
    for first in results[router]:
        return first
    raise RuntimeError(
        f"{router} runs more often in a recomputation than in the first run of its layer: the layer takes another path "
        "the second time. Leave 'recompute' out of strategies, or report the model."
    )
