"""A scope that offloads to a real file, and no cyclic collector: only what is really let go of is freed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction


@pytest.fixture(autouse=True)
def only_reference_counts() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def make() -> Callable[..., Scope]:
    """Makes a scope from one strategy, or from a function of the site, and the parameters."""
    store = OffloadStore(FileTier())

    def make_scope(strategy: Strategy | Callable[[Site], Strategy], *parameters: torch.Tensor) -> Scope:
        choose = (lambda site: strategy) if isinstance(strategy, Strategy) else strategy
        return Scope(ByFunction(choose), Ledger(), parameters=parameters, store=lambda: store, min_mitigated_bytes=1)

    return make_scope
