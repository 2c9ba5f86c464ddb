"""Known faults of saved tensors: views rebuilt wrongly, changes in place that go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import instrumented
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.faults.outcomes import STRATEGIES, Forward, assert_same, outcome
from tests.faults.small_scopes import ALL, A, B, assert_equal_or_near, assert_nothing_held, leaf, plainly, scope_of

# 21: views

OTHER_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided": lambda x: x.as_strided((3, 5), (9, 1), 4),
    "as_strided, overlapping": lambda x: x.as_strided((4, 4), (3, 2), 1),
    "split": lambda x: x.split([1, 5])[1],
    "chunk of columns": lambda x: x.chunk(2, dim=-1)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "tensor_split": lambda x: x.tensor_split(4, dim=1)[2],
    "unsafe_split": lambda x: torch.unsafe_split(x, 2)[1],
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2)[1],
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [8, 6]),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "unsqueeze": lambda x: x[2:3].unsqueeze(1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "swapaxes of a slice": lambda x: x[1:4].swapaxes(0, 1),
    "movedim": lambda x: x.view(2, 3, 2, 4).movedim(1, 3),
    "expand of a scalar": lambda x: x[0, 0].expand(3, 4),
    "broadcast_to": lambda x: x[None, 1].broadcast_to(4, 2, 8),
    "zero-dimensional": lambda x: x[1, 1],
    "empty rows": lambda x: x[3:3],
    "empty columns": lambda x: x[:, 8:],
    "detached alias": lambda x: x + 0 * x.detach()[1:2],
    "real part": lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 4, 2)))[..., 1],
    "flattened heads": lambda x: x.view(3, 2, 8).transpose(1, 2).flatten(0, 1),
    "last row of each": lambda x: x.view(2, 3, 8)[:, -1],
}


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("view", OTHER_VIEWS)
def test_other_views_come_back_as_they_were(view: str, strategy: Strategy) -> None:
    """21: slices, splits, strided, expanded, zero-dimensional and empty views, saved by a later operator of its own, as
    the input of an operator, and as its result."""

    def step(run: Callable[..., Any]) -> torch.Tensor:
        x = leaf(6, 8)
        y = run(A, torch.tanh, x)
        shown = run(B, OTHER_VIEWS[view], y)
        again = run(Site("c", "linear", 0), lambda v: v * v.detach().cos() * v, shown)
        (again.sum() + (OTHER_VIEWS[view](y) * again).sum() + (shown.exp() * shown).sum()).backward()
        assert x.grad is not None
        return x.grad

    wanted = step(plainly)
    scope = scope_of(strategy)
    with scope.open():
        got = step(scope.run)
    if strategy is Strategy.QUANTIZE:
        assert float((got - wanted).norm()) <= 0.05 * float(wanted.norm())
    else:
        assert torch.equal(got, wanted)
    assert_nothing_held(scope)


@pytest.mark.parametrize("strategy", ALL)
def test_halves_of_one_storage_under_different_strategies_are_right(strategy: Strategy) -> None:
    """21, 23: gate and up are halves of one product; each consumer has a strategy of its own."""

    def step(run: Callable[..., Any]) -> torch.Tensor:
        x = leaf(6, 16)
        gate, up = run(A, lambda x: x.sin(), x).chunk(2, dim=-1)
        product = run(B, lambda g: torch.sigmoid(g) * g, gate) * up
        (product * up.t().reshape(6, 8).detach()).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = step(plainly)
    for other in ALL:
        scope = scope_of(lambda site, other=other: strategy if site.name == "a" else other)
        with scope.open():
            got = step(scope.run)
        is_exact = Strategy.QUANTIZE not in (strategy, other)
        assert_equal_or_near(Strategy.KEEP if is_exact else Strategy.QUANTIZE, got, wanted)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (1, 1), (1, 8), (8, 1)])
def test_results_of_every_shape_come_back(shape: tuple[int, ...], strategy: Strategy) -> None:
    """21: an operator whose whole result has no dimension, no element, one row or one column."""

    def step(run: Callable[..., Any]) -> torch.Tensor:
        x = leaf(*shape)
        y = run(A, torch.sin, x)
        run(B, lambda y: (y * y.exp()).sum(), y).backward()
        assert x.grad is not None
        return x.grad

    wanted = step(plainly)
    scope = scope_of(strategy)
    with scope.open():
        assert_equal_or_near(strategy, step(scope.run), wanted)


# 30: changes in place


def change_a_view(y: torch.Tensor) -> None:
    y[1:].add_(1)


def change_through_out(y: torch.Tensor) -> None:
    torch.add(y, 1, out=y)


def change_by_index(y: torch.Tensor) -> None:
    y[0, 0] = 7.0


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda y: y.add_(1),
    "mul_": lambda y: y.mul_(2),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(3),
    "clamp_": lambda y: y.clamp_(-0.1, 0.1),
    "relu_": lambda y: torch.relu_(y),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 0.0),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0]), torch.ones(1, y.shape[1])),
    "scatter_": lambda y: y.scatter_(1, torch.zeros(len(y), 1, dtype=torch.int64), 5.0),
    "index_put": change_by_index,
    "a view": change_a_view,
    "out=": change_through_out,
    "foreach": lambda y: torch._foreach_add_([y], 1.0),  # pyright: ignore[reportPrivateImportUsage]
    "in-place dropout": lambda y: nn.functional.dropout(y, 0.5, inplace=True),
    "operator +=": lambda y: y.__iadd__(1),
    "random": lambda y: y.normal_(),
}


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_after_saving_raises(change: str, strategy: Strategy) -> None:
    """30: whatever changed the tensor, and however it is held, backward raises as plain autograd does."""

    def loss_of(run: Callable[..., Any]) -> torch.Tensor:
        y = run(A, lambda x: x * 3, leaf(6, 8))
        loss = run(B, lambda y: (y * y).sum(), y)
        with torch.no_grad():
            CHANGES[change](y)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(plainly).backward()
    scope = scope_of(strategy)
    with scope.open():
        loss = loss_of(scope.run)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_before_saving_is_right(change: str, strategy: Strategy) -> None:
    """30: changed first and saved then, the changed value is the one that comes back."""

    def step(run: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(0)
        x = leaf(6, 8)
        y = run(A, lambda x: x * 3, x)
        with torch.no_grad():
            CHANGES[change](y)
        run(B, lambda y: (y * y).sum(), y).backward()
        assert x.grad is not None
        return x.grad

    wanted = step(plainly)
    scope = scope_of(strategy)
    with scope.open():
        got = step(scope.run)
    if strategy is Strategy.QUANTIZE:
        assert float((got - wanted).norm()) <= 0.05 * float(wanted.norm()) + 1e-12
    else:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("strategy", ALL)
def test_a_change_of_an_operators_input_after_it_ran_raises(strategy: Strategy) -> None:
    """30: the input of an operator whose inner values were dropped is changed afterwards: no recomputation from other
    numbers."""
    x = leaf(6, 8)
    scope = scope_of(lambda site: strategy if site.name == "b" else Strategy.KEEP)
    with scope.open():
        y = x * 3
        loss = scope.run(B, lambda y: (y.sin() * y).sum(), y)
        with torch.no_grad():
            y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", STRATEGIES)
def test_in_place_activations_inside_a_model_are_right(name: str) -> None:
    """30: legal changes in place, of tensors not saved yet: a residual added with +=, an in-place SiLU."""

    class InPlace(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inside(x)
            y += 0.5
            nn.functional.silu(y, inplace=True)
            y[..., 0] *= 2
            return y

    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    model.model.layers[1].self_attn.o_proj = InPlace(model.model.layers[1].self_attn.o_proj)
    inputs = {**tiny_batch(model, 2, 8), "use_cache": False}

    def body(forward: Forward) -> list[torch.Tensor]:
        loss = forward(**inputs).loss
        loss.backward()
        return [loss]

    plain = outcome(model, body)
    with instrumented(model):
        assert_same(outcome(model, body, STRATEGIES[name]), plain, name)
