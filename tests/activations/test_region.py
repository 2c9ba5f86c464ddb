"""Recompute: what a recomputation costs, what it leaves alone, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction

KEEP, RECOMPUTE = Strategy.KEEP, Strategy.RECOMPUTE


def scope_for(recomputed: set[str], *parameters: torch.Tensor) -> Scope:
    choices = ByFunction(lambda site: RECOMPUTE if site.name in recomputed else KEEP)
    return Scope(choices, Ledger(), parameters=parameters, min_mitigated_bytes=1)


def site(name: str, *, is_block: bool = False, is_recomputable: bool = True) -> Site:
    return Site(name, "linear", 0, is_block, is_recomputable)


class Chain:
    """linear a -> tanh b -> linear c -> sum of squares, each an operator, in floating-point operations."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.x = torch.randn(8, 16, requires_grad=True)
        self.product_flops = 2 * 8 * 16 * 16

    def loss(self, scope: Scope) -> torch.Tensor:
        with scope.open():
            h = scope.run(site("a"), self.a, self.x)
            h = scope.run(site("b"), torch.tanh, h)
            h = scope.run(site("c"), self.c, h)
            return (h * h).sum()

    def parameters(self) -> list[nn.Parameter]:
        return [*self.a.parameters(), *self.c.parameters()]


@pytest.mark.parametrize(
    ("recomputed", "num_products"),
    [
        (set(), 0),
        # tanh saves its result and c saves it too: one recomputation of tanh, whose input only a recomputation of `a`
        # gives.
        ({"b"}, 0),
        ({"a"}, 0),  # no operator saves what `a` gives
        ({"a", "b"}, 1),
        ({"c"}, 1),  # the loss saves it
        ({"a", "b", "c"}, 2),
    ],
)
def test_a_recompute_runs_each_operator_once(recomputed: set[str], num_products: int):
    chain = Chain()
    loss = chain.loss(scope_for(recomputed, *chain.parameters()))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == (4 + num_products) * chain.product_flops


def test_a_recompute_stops_when_all_is_there():
    """Three products in one region; what the last one gives is not saved, so it is not computed again."""
    weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(3)]
    x = torch.randn(8, 16, requires_grad=True)
    scope = scope_for({"block"}, *weights)
    with scope.open():
        h = scope.run(
            site("block", is_block=True), lambda x: ((x @ weights[0]).sin() @ weights[1]).sin() @ weights[2], x
        )
        loss = h.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    product = 2 * 8 * 16 * 16
    assert backward.get_total_flops() == (6 + 2) * product
    assert scope.ledger.num_recomputes == 1


def test_a_block_is_recomputed_as_a_whole_and_overrides_its_operators():
    chain = Chain()
    num_runs: list[str] = []

    def counted(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            num_runs.append(name)
            return function(x)

        return run

    scope = scope_for({"block", "b"}, *chain.parameters())

    def block(x: torch.Tensor) -> torch.Tensor:
        h = scope.run(site("a"), counted("a", chain.a), x)
        return scope.run(site("c"), counted("c", chain.c), scope.run(site("b"), counted("b", torch.tanh), h))

    with scope.open():
        h = scope.run(site("block", is_block=True), block, chain.x)
        loss = (h * h).sum()
        num_calls = len(scope.trace.calls)
        # Also inside of the context, where the scope could be taken for the one of a new forward.
        loss.backward()
    assert num_runs == ["a", "b", "c"] * 2
    assert scope.ledger.num_recomputes == 1 and len(scope.trace.calls) == num_calls == 4


def test_sites_that_may_not_be_recomputed_are_kept():
    num_runs = 0

    def router(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        return x.exp().softmax(-1)

    x = torch.randn(8, 16, requires_grad=True)
    scope = scope_for({"router"})
    with scope.open():
        loss = (scope.run(site("router", is_recomputable=False), router, x) ** 2).sum()
    loss.backward()
    assert num_runs == 1 and scope.ledger.freed_bytes["recompute"] == 0


def test_outputs_and_internals_are_really_dropped():
    x = torch.randn(64, 64, requires_grad=True)
    scope = scope_for({"a", "b"})
    with scope.open():
        h = scope.run(site("a"), lambda x: x.exp().sin().tanh(), x)
        loss = scope.run(site("b"), lambda h: h.sin().exp(), h).sum()
        del h
        assert scope.ledger.held_bytes == x.numel() * 4  # the one input
    # Two internals and what `a` gives; x, which autograd would not have saved, is the price.
    assert scope.ledger.freed_bytes["recompute"] == scope.ledger.demand_bytes == 3 * x.numel() * 4
    del loss
    assert scope.ledger.held_bytes == 0


# State of the first run


def test_random_numbers_are_drawn_again_and_the_stream_goes_on():
    x = torch.ones(64, 64, requires_grad=True)
    torch.manual_seed(1)
    scope = scope_for({"a"})
    with scope.open():
        y = scope.run(site("a"), lambda x: F.dropout(x, 0.5).sin(), x)
        loss = (y * y).sum()
    after_forward = torch.rand(1)
    loss.backward()
    after_backward = torch.rand(1)
    # sin's slope at a dropped element is not that at a kept one: the same ones were dropped.
    kept = y.detach() != 0
    assert x.grad is not None and 0.3 < kept.float().mean() < 0.7
    slope = 2 * math.sin(2.0) * 2 * math.cos(2.0)
    torch.testing.assert_close(x.grad[kept], torch.full_like(x.grad[kept], slope))
    assert torch.equal(x.grad[~kept], torch.zeros_like(x.grad[~kept]))
    torch.manual_seed(1)
    F.dropout(x, 0.5)
    assert torch.equal(torch.rand(1), after_forward) and torch.equal(torch.rand(1), after_backward)


@pytest.mark.parametrize("is_first_run_under_autocast", [True, False])
def test_autocast_is_that_of_the_first_run(is_first_run_under_autocast: bool):
    linear = nn.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    dtypes = []

    def operator(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        dtypes.append(y.dtype)
        return y.sin()

    scope = scope_for({"a"}, *linear.parameters())
    with scope.open(), torch.autocast("cpu", torch.bfloat16, enabled=is_first_run_under_autocast):
        y = scope.run(site("a"), operator, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_first_run_under_autocast):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu") is not is_first_run_under_autocast
    assert dtypes == [torch.bfloat16 if is_first_run_under_autocast else torch.float32] * 2


def test_a_recompute_under_no_grad_still_records():
    """Backward may be called under no_grad by a caller that manages gradients itself."""
    x = torch.randn(8, 16, requires_grad=True)
    scope = scope_for({"a"})
    with scope.open():
        loss = scope.run(site("a"), lambda x: x.sin().exp(), x).sum()
    with torch.no_grad():
        (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, x.detach().sin().exp() * x.detach().cos())


# Operators that are no functions of their inputs


def run_changed(
    first: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[torch.Tensor], torch.Tensor],
    *,
    saves_output: bool = False,
) -> None:
    functions = iter((first, second))
    x = torch.randn(8, 16, requires_grad=True)
    scope = scope_for({"a"})
    with scope.open():
        y = scope.run(site("a"), lambda x: next(functions)(x), x)
        loss = (y * y).sum() if saves_output else y.sum()
    loss.backward()


def test_a_recompute_that_saves_less_is_refused():
    with pytest.raises(RuntimeError, match="recomputing a saved fewer tensors .* takes another path the second time"):
        run_changed(lambda x: x.sin().exp().tanh(), lambda x: x + 1)


def test_a_recompute_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match=r"recomputing a gave .*shape \(4, 16\).*not a function of its inputs"):
        run_changed(lambda x: x.sin().exp(), lambda x: (x + 0)[:4].sin().exp())


def test_a_recompute_of_another_dtype_is_refused():
    with pytest.raises(RuntimeError, match=r"recomputing a gave a torch.bfloat16 tensor"):
        run_changed(lambda x: x.sin().exp(), lambda x: x.bfloat16().sin().exp())


def test_a_recompute_with_an_output_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="recomputing a gave .* bytes where the first run gave"):
        run_changed(lambda x: x + 1, lambda x: (x + 1)[:4].clone(), saves_output=True)
