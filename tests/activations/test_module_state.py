"""A recomputation finds the module as the first run did and leaves no trace, or says why it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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


@pytest.mark.parametrize("change", [exchange, write])
def test_changed_parameters_are_refused(change: Callable[[HalfInTraining], None]) -> None:
    module = HalfInTraining()
    loss = forward(module, torch.randn(4, 8))
    change(module)
    with pytest.raises(
        RuntimeError, match=r"parameter inner\.(weight|bias) of block changed between forward and backward"
    ):
        loss.backward()


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_what_is_trained_is_that_of_the_first_run(is_frozen_first: bool) -> None:
    """Adapters that are switched off for one forward, say, are frozen in it and trained again after it."""
    torch.manual_seed(0)
    module, x = HalfInTraining(), torch.randn(4, 8)

    def gradient(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        module.inner.bias.requires_grad_(not is_frozen_first)
        loss = run()
        module.inner.bias.requires_grad_(is_frozen_first)
        loss.backward()
        assert module.inner.bias.requires_grad == is_frozen_first
        assert module.inner.weight.grad is not None
        return module.inner.weight.grad

    expected = gradient(lambda: module(x).sum())
    assert torch.equal(gradient(lambda: forward(module, x)), expected)


class Remembers(nn.Module):
    """Changes itself in forward in every way that a recomputation rolls back."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.count = 0
        self.seen: list[Any] = []
        self.by_name: dict[str, list[int]] = {"runs": []}
        self.total = torch.zeros(())
        self.is_fresh: bool | None = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.count
        self.count += 1
        self.seen.append(y.detach().sum())
        self.by_name["runs"].append(self.count)
        self.total.add_(1.0)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(8), persistent=False)
        if "is_fresh" in vars(self):
            del self.is_fresh
            y = y.exp()
        self.last = y
        return (y * self.scale * float(self.total)).sin()

    def facts(self) -> list[Any]:
        return [self.count, len(self.seen), self.by_name, float(self.total), self.scale.tolist(), sorted(vars(self))]


def test_a_recompute_takes_back_what_it_changes() -> None:
    x, outcomes = torch.randn(4, 8), []
    for run in (lambda module: module(x).sum(), lambda module: forward(module, x)):
        torch.manual_seed(0)
        module = Remembers()
        losses = [run(module), run(module)]  # both first runs, then both recomputes
        scale, total, last = module.scale, module.total, module.last
        torch.stack(losses).sum().backward()
        assert module.scale is scale and module.total is total and module.last is last
        assert module._non_persistent_buffers_set == {"scale"}
        assert module.inner.weight.grad is not None
        outcomes.append((losses, module.inner.weight.grad, module.facts()))
    (losses, gradient, facts), (got_losses, got_gradient, got_facts) = outcomes
    assert torch.equal(torch.stack(losses), torch.stack(got_losses)) and torch.equal(gradient, got_gradient)
    assert facts == got_facts and got_facts[0] == got_facts[1] == got_facts[3] == 2


def test_a_large_tensor_that_forward_writes_into_is_refused() -> None:
    class Writes(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(100_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table[0] += 1.0
            return x.exp().sin()

    loss = forward(Writes(), torch.randn(4, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"a tensor of block \(table\) was written to"):
        loss.backward()


def test_kernels_of_attention_are_those_of_the_first_run() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.inner(x)
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch.manual_seed(0)
    module, x = Attends(), torch.randn(2, 2, 16, 8)
    gradients = []
    for run in (lambda: module(x).sum(), lambda: forward(module, x)):
        with sdpa_kernel(SDPBackend.MATH):
            loss = run()
        gradients.append(torch.autograd.grad(loss, module.inner.weight)[0])
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.equal(*gradients)


def test_hooks_inside_run_again_only_where_they_act() -> None:
    calls: Counter[str] = Counter()

    def looks(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        calls["looks"] += 1

    def changes(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls["changes"] += 1
        return output * 2.0

    def writes(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        calls["writes"] += 1
        args[0].mul_(3.0)

    def draws(module: nn.Module, args: Any) -> None:
        calls["draws"] += 1
        torch.rand(1)

    torch.manual_seed(0)
    linear, dropout, x = nn.Linear(8, 8), nn.Dropout(0.5), torch.randn(4, 8)
    module = nn.Sequential(nn.Tanh(), linear, dropout, nn.Tanh())
    linear.register_forward_hook(looks)
    linear.register_forward_hook(changes)
    dropout.register_forward_pre_hook(writes)
    dropout.register_forward_pre_hook(draws)
    gradients = []
    for run in (lambda: module(x).sum(), lambda: forward(module, x)):
        torch.manual_seed(1)
        calls.clear()
        gradients.append(torch.autograd.grad(run(), linear.weight)[0])
    assert torch.equal(*gradients)
    assert calls == {"looks": 1, "changes": 2, "writes": 2, "draws": 2}
    assert list(linear._forward_hooks.values()) == [looks, changes]
