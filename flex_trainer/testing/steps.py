"""One training step of a model under chosen strategies, with everything a test wants to compare.

plain = train_step(model, batch)
with instrumented(model):
    other = train_step(model, batch, lambda site: Strategy.RECOMPUTE)
assert_same_step(other, plain)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.activations.trace import Trace
from flex_trainer.models.discovery import ModelMap, discover
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.strategy import Site, Strategy

Choose = Callable[[Site], Strategy]

_MIXED = (Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.KEEP)


class ByFunction:
    """Choices that a function makes."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def strategy(self, site: Site) -> Strategy:
        return self._choose(site)


def mixed(site: Site) -> Strategy:
    """Recompute, offload or keep: at random, but always the same for a site."""
    return _MIXED[zlib.crc32(site.name.encode()) % len(_MIXED)]


@dataclass
class Step:
    """What one forward and backward gave."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    draw: torch.Tensor
    """What the global random stream gives next."""
    ledger: Ledger
    trace: Trace
    forward_held_bytes: int
    """Held when forward had ended; 0 in a plain step, where nothing is counted."""


@contextmanager
def instrumented(model: nn.Module) -> Iterator[ModelMap]:
    """Put the engine between `model` and its operators inside the context."""
    model_map = discover(model)
    instrumentation = Instrumentation(model, model_map)
    try:
        yield model_map
    finally:
        instrumentation.remove()


def train_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    choose: Choose | None = None,
    *,
    store: OffloadStore | None = None,
    autocast: torch.dtype | None = None,
    quantize_dtype: torch.dtype = torch.int8,
    seed: int = 0,
) -> Step:
    """Forward and backward on the CPU from zero gradients, every storage however small under its strategy.

    Args:
        choose: the strategy of each site; None for a plain step, without the engine.
        store: where to offload to; a new temporary file when None.
        autocast: run forward under CPU autocast of this dtype.
        seed: of the global random stream at the start of forward.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    ledger, trace = Ledger(), Trace()
    context = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    if choose is None:
        with context:
            loss = model(**batch).loss
    else:
        store = store or OffloadStore(FileTier())
        scope = Scope(
            ByFunction(choose),
            ledger,
            parameters=[*model.parameters(), *model.buffers()],
            modules=dict(model.named_modules()),
            store=lambda: store,
            quantize_dtype=quantize_dtype,
            min_mitigated_bytes=1,
        )
        trace = scope.trace
        with scope.open(), context:
            loss = model(**batch).loss
        store.settle()
    forward_held_bytes = ledger.held_bytes
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), gradients, torch.rand(4), ledger, trace, forward_held_bytes)


def assert_same_step(step: Step, plain: Step) -> None:
    """Loss, every gradient and the random stream are equal bit for bit, and the engine holds nothing any more."""
    assert torch.equal(step.loss, plain.loss), f"loss {step.loss} instead of {plain.loss}"
    assert step.gradients.keys() == plain.gradients.keys()
    unequal = [n for n, gradient in plain.gradients.items() if not torch.equal(step.gradients[n], gradient)]
    assert not unequal, f"{len(unequal)} of {len(plain.gradients)} gradients differ, the first is {unequal[0]}"
    assert torch.equal(step.draw, plain.draw), "the global random stream was moved"
    assert_nothing_held(step)


def assert_nothing_held(step: Step) -> None:
    assert (step.ledger.held_bytes, step.ledger.recovered_bytes) == (0, 0)
