"""What any piece of training gives, plainly and under each strategy, for the tests of known faults.

plain = outcome(model, body)
with instrumented(model):
    assert_same(outcome(model, body, STRATEGIES["recompute"]), plain)

`body(forward)` runs whatever the test is about: `forward(**batch)` is one call of the model, managed where the engine
would manage it (with gradients enabled), plain where it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.models.discovery import discover
from flex_trainer.planner.plan import Uniform
from flex_trainer.strategy import Strategy
from flex_trainer.testing.steps import ByFunction, Choose, mixed

EXACT: dict[str, Choose] = {
    "keep": lambda site: Strategy.KEEP,
    "recompute operators": lambda site: Strategy.KEEP if site.is_block else Strategy.RECOMPUTE,
    "recompute blocks": lambda site: Strategy.RECOMPUTE if site.is_block else Strategy.KEEP,
    "offload": lambda site: Strategy.OFFLOAD,
    "mixed": mixed,
}
"""Bit-equal to the plain run."""

STRATEGIES: dict[str, Choose] = {**EXACT, "quantize": Uniform(Strategy.QUANTIZE).strategy}

QUANTIZED_GRADIENT_ERROR = 0.05
"""Relative error of each gradient under quantize that the documentation of strategies states."""

Forward = Callable[..., Any]
Body = Callable[[Forward], Iterable[torch.Tensor]]


@dataclass
class Outcome:
    """What a body gave."""

    values: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    draw: torch.Tensor
    """What the global random stream gives next."""
    ledgers: list[Ledger] = field(default_factory=list)
    """One for each managed forward."""

    @property
    def freed_bytes(self) -> int:
        return sum(sum(ledger.freed_bytes.values()) for ledger in self.ledgers)

    @property
    def num_recomputes(self) -> int:
        return sum(ledger.num_recomputes for ledger in self.ledgers)


def outcome(model: nn.Module, body: Body, choose: Choose | None = None, *, seed: int = 0) -> Outcome:
    """Run `body` from zero gradients; `choose` None is the plain run, without the engine."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    store = OffloadStore(FileTier())
    ledgers: list[Ledger] = []
    modules = {} if choose is None else {o.site.name: o.module for o in discover(model).operators}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if choose is None or not torch.is_grad_enabled():
            return model(*args, **kwargs)
        ledgers.append(Ledger())
        scope = Scope(
            ByFunction(choose),
            ledgers[-1],
            parameters=[*model.parameters(), *model.buffers()],
            modules=modules,
            store=lambda: store,
            min_mitigated_bytes=1,
        )
        try:
            with scope.open():
                return model(*args, **kwargs)
        finally:
            store.settle()

    values = [value.detach().clone() for value in body(forward)]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(values, gradients, torch.rand(4), ledgers)


def assert_same(got: Outcome, plain: Outcome, name: str) -> None:
    """Values, gradients and the random stream as in the plain run, and nothing held any more.

    Bit for bit, but for gradients under "quantize", which stay within the stated error.
    """
    assert len(got.values) == len(plain.values)
    for value, wanted in zip(got.values, plain.values, strict=True):
        assert torch.equal(value, wanted), f"{name}: {value} instead of {wanted}"
    assert_same_gradients(got.gradients, plain.gradients, name)
    assert torch.equal(got.draw, plain.draw), f"{name}: the global random stream was moved"
    for ledger in got.ledgers:
        assert (ledger.held_bytes, ledger.recovered_bytes) == (0, 0), name


def assert_same_gradients(got: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], name: str) -> None:
    """The same parameters have gradients, and equal ones; under "quantize", within the stated error."""
    assert got.keys() == plain.keys(), name
    if name != "quantize":
        unequal = [key for key, gradient in plain.items() if not torch.equal(got[key], gradient)]
        assert not unequal, f"{name}: {len(unequal)} of {len(plain)} gradients differ, the first is {unequal[0]}"
        return
    largest = max(float(gradient.float().norm()) for gradient in plain.values())
    for key, gradient in plain.items():
        # A gradient that is all but zero has no direction to be wrong about.
        size = max(float(gradient.float().norm()), 1e-2 * largest)
        error = float((got[key].float() - gradient.float()).norm()) / size
        assert error < QUANTIZED_GRADIENT_ERROR, f"{key} is off by {error:.1%}"
