"""Saved parameters come back with what is on them, whatever happens around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.planner.plan import Uniform
from flex_trainer.strategy import Site, Strategy

SITE = Site("linear", "linear", 0)


class Accumulating(torch.autograd.Function):
    """Adds the gradient of the weight where the weight says, and leaves a mark, as fused kernels do."""

    found: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        Accumulating.found.append(weight)
        weight.main_grad += x.t() @ gradients[0]
        weight.is_added = True
        return gradients[0] @ weight.t(), None


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(8, 8))
        self.weight.main_grad = torch.zeros(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Accumulating.apply(x.exp(), self.weight).sin()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("strategy", [Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD])
def test_a_kernel_finds_attributes_of_the_parameter(strategy: Strategy, is_frozen: bool, is_argument: bool) -> None:
    torch.manual_seed(0)
    module, x = Linear(), torch.randn(4, 8, requires_grad=True)
    weight = module.weight
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    expected_main = weight.main_grad.clone()
    weight.main_grad.zero_()
    del weight.is_added
    weight.requires_grad_(not is_frozen)
    Accumulating.found.clear()

    def by_argument(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        assert given is weight
        return module(x)

    scope = Scope(Uniform(strategy), Ledger(), parameters=module.parameters(), modules={"linear": module})
    with scope.open():
        y = scope.run(SITE, by_argument, x, weight) if is_argument else scope.run(SITE, module, x)
    y.sum().backward()

    assert x.grad is not None and torch.equal(x.grad, expected)
    assert torch.equal(weight.main_grad, expected_main) and weight.is_added
    [found] = Accumulating.found
    assert isinstance(found, nn.Parameter) and found.requires_grad is not is_frozen
    assert vars(found) is vars(weight)
    assert (found is weight) is is_frozen  # of a trained one autograd makes a new tensor in any case


def test_second_derivatives_of_a_parameter_with_attributes() -> None:
    torch.manual_seed(0)
    weight: Any = nn.Parameter(torch.randn(8, 8))
    weight.main_grad = torch.zeros(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def run() -> torch.Tensor:
        return (x.exp() @ weight).sin().sum()

    def second(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(gradient.exp().sum(), [x, weight])

    expected = second(run())
    scope = Scope(Uniform(Strategy.KEEP), Ledger(), parameters=[weight])
    with scope.open():
        y = scope.run(SITE, run)
    assert all(torch.equal(got, wanted) for got, wanted in zip(second(y), expected, strict=True))
