"""Scopes around a few operations, for tests of single saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction

ALL = (Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE)
A, B = Site("a", "linear", 0), Site("b", "linear", 0)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def scope_of(choose: Strategy | Callable[[Site], Strategy], *parameters: torch.Tensor) -> Scope:
    function = (lambda site: choose) if isinstance(choose, Strategy) else choose
    store = OffloadStore(FileTier())
    return Scope(ByFunction(function), Ledger(), parameters=parameters, store=lambda: store, min_mitigated_bytes=1)


def plainly(site: Site, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def assert_nothing_held(scope: Scope) -> None:
    assert (scope.ledger.held_bytes, scope.ledger.recovered_bytes) == (0, 0)


def assert_equal_or_near(strategy: Strategy, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if strategy is Strategy.QUANTIZE:
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
    else:
        assert torch.equal(got, wanted)
