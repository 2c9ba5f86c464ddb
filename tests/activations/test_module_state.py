"""A replay finds the module as the first run did, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy


class Everything:
    def strategy(self, site: Site) -> Strategy:
        return Strategy.RECOMPUTE


class HalfInTraining(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x).exp() * (0.5 if self.training else 1.0)).sin()


def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scope = Scope(Everything(), Ledger(), parameters=module.parameters(), modules={"block": module})
    with scope.open():
        return scope.run(Site("block", "mlp", 0, is_block=True), module, x).sum()


def test_training_flags_are_those_of_the_first_run() -> None:
    torch.manual_seed(0)
    module, x = HalfInTraining(), torch.randn(4, 8)
    (expected,) = torch.autograd.grad(module(x).sum(), module.inner.weight)
    loss = forward(module.train(), x)
    module.eval()
    (gradient,) = torch.autograd.grad(loss, module.inner.weight)
    assert torch.equal(gradient, expected)
    assert not module.training and not module.inner.training


def exchange(module: HalfInTraining) -> None:
    module.inner.weight.data = module.inner.weight.data * 2


def write(module: HalfInTraining) -> None:
    with torch.no_grad():
        module.inner.bias.add_(1.0)  # autograd saves no bias, so it would not notice


def freeze(module: HalfInTraining) -> None:
    module.inner.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [exchange, write, freeze])
def test_changed_parameters_are_refused(change: Callable[[HalfInTraining], None]) -> None:
    module = HalfInTraining()
    loss = forward(module, torch.randn(4, 8))
    change(module)
    with pytest.raises(RuntimeError, match="the parameters of block changed between forward and backward"):
        loss.backward()
