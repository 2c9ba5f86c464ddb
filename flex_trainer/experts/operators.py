"""The operators of an experts block, and where the engine that manages activations gets between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flex_trainer.experts.layout import Layout, RecomputeVote


class Run(Protocol):
    """Runs one operator, or a block of operators, and returns its result."""

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any: ...


class Operators(Protocol):
    """What happens around the operators of one layer's experts on several ranks.

    exchange       counts and votes to all ranks; the layout is known
    ep_block       block of the next two; recomputed as a whole only where all ranks have planned it
        dispatch   rows (M, D) from all ranks
        experts    block: this rank's experts on them (permute, up, activation, down, unpermute)
    combine        rows back, and their sum per token (N, D)
    """

    def recompute_vote(self) -> RecomputeVote:
        """What to tell the other ranks together with the counts."""
        ...

    def begin(self, layout: Layout) -> Run:
        """The exact counts are known; nothing of this layer's experts has run yet. Returns what runs the operators."""
        ...


class UnmanagedOperators:
    """Nothing is between the operators."""

    def recompute_vote(self) -> RecomputeVote:
        return RecomputeVote()

    def begin(self, layout: Layout) -> Run:
        return run_plainly


def run_plainly(name: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
