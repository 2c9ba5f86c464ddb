"""Values live exactly as long as backward may ask for them, whatever happens in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flex_trainer.activations.context import current_scope
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy

KEEP, RECOMPUTE, OFFLOAD, QUANTIZE = Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE
EXACT = (KEEP, RECOMPUTE, OFFLOAD)
ALL = (*EXACT, QUANTIZE)

A, B = Site("a", "linear", 0), Site("b", "linear", 0)
BLOCK = Site("block", "mlp", 0, is_block=True)

Make = Callable[..., Scope]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def assert_close_enough(strategy: Strategy, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if strategy is QUANTIZE:
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
    else:
        assert torch.equal(got, wanted)


# Backward: when, how often, how far


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("is_inside", [True, False])
def test_backward_before_and_after_the_context_ended(make: Make, strategy: Strategy, is_inside: bool):
    x = leaf(6, 8)
    scope = make(strategy)
    with scope.open():
        loss = scope.run(B, lambda y: (y * y.exp()).sum(), scope.run(A, torch.sin, x))
        if is_inside:
            loss.backward()
    if not is_inside:
        loss.backward()
    y = x.detach().sin()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (1 + y) * y.exp() * x.detach().cos())
    assert scope.was_used


@pytest.mark.parametrize("strategy", EXACT)
def test_backward_twice(make: Make, strategy: Strategy):
    x = leaf(6, 8)
    scope = make(strategy)
    with scope.open():
        loss = scope.run(B, lambda y: (y * y.exp()).sum(), scope.run(A, torch.sin, x))
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert scope.ledger.num_recomputes == (
        2 if strategy is RECOMPUTE else 0
    )  # each operator once, not once per backward
    del loss
    assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0


@pytest.mark.parametrize("strategy", EXACT)
def test_gradient_of_a_gradient(make: Make, strategy: Strategy):
    def second_order(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = leaf(6, 8)
        loss = run(B, lambda y: (y * y.exp()).sum(), run(A, torch.sin, x))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        return second

    wanted = second_order(lambda site, function, *args: function(*args))
    scope = make(strategy)
    with scope.open():
        assert torch.equal(second_order(scope.run), wanted)


@pytest.mark.parametrize("strategy", ALL)
def test_branches_without_backward_hold_nothing(make: Make, strategy: Strategy):
    """Experts without tokens and unused heads never unpack; their values die with their nodes."""
    x = leaf(16, 16)
    scope = make(strategy)
    with scope.open():
        y = scope.run(A, torch.sin, x)
        unused = scope.run(B, torch.exp, y)
        loss = scope.run(B, lambda y: (y * y).sum(), y)
        del y
    loss.backward()
    del loss
    assert scope.ledger.held_bytes > 0 or strategy is not KEEP
    del unused
    assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0


@pytest.mark.parametrize("strategy", EXACT)
def test_backward_to_inputs_then_to_weights(make: Make, strategy: Strategy):
    """The split backward of zero-bubble schedules."""
    x, w = leaf(6, 8), leaf(8, 8, seed=1)
    scope = make(strategy, w)
    with scope.open():
        y = scope.run(A, lambda x: F.linear(x, w).sin(), x)
        loss = scope.run(B, lambda y: (y * y).sum(), y)
    (grad_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    (grad_w,) = torch.autograd.grad(loss, w)
    plain = (F.linear(x, w).sin() ** 2).sum()
    for got, wanted in zip((grad_x, grad_w), torch.autograd.grad(plain, (x, w)), strict=True):
        torch.testing.assert_close(got, wanted)


# Errors


@pytest.mark.parametrize("strategy", ALL)
def test_an_error_in_forward_leaves_nothing(make: Make, strategy: Strategy):
    class Broken(Exception):
        pass

    def fail(y: torch.Tensor) -> torch.Tensor:
        z = y.exp()
        raise Broken(z.shape)

    x = leaf(16, 16)
    scope = make(strategy)

    def forward() -> None:
        with scope.open():
            scope.run(BLOCK, lambda x: scope.run(B, fail, scope.run(A, torch.sin, x)), x)

    with pytest.raises(Broken) as caught:
        forward()
    caught.value.__traceback__ = None
    del caught
    assert current_scope() is None
    assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0
    again = make(strategy)
    with again.open():
        loss = again.run(A, torch.sin, x).sum()
    loss.backward()
    assert x.grad is not None


def test_an_error_in_a_recompute_leaves_nothing(make: Make):
    is_broken = False

    def operator(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if is_broken:
            raise ZeroDivisionError("on purpose")
        return y.exp().sin()

    x = leaf(16, 16)
    scope = make(RECOMPUTE)
    with scope.open():
        loss = scope.run(A, operator, x).sum()
    is_broken = True
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError) as caught:
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before) and current_scope() is None and torch.is_grad_enabled()
    caught.value.__traceback__ = None
    del caught, loss
    assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0


# Parameters and other tensors that are referred to


@pytest.mark.parametrize("strategy", ALL)
def test_parameters_are_never_copied(make: Make, strategy: Strategy):
    """Also as transposes, as one expert's slice, as another name of a tied weight: all are the same storage."""
    weights = nn.Parameter(torch.randn(4, 8, 8))
    tied = nn.Parameter(weights.data.view(32, 8))
    x = leaf(6, 8)
    scope = make(strategy, weights)
    with scope.open():
        y = scope.run(A, lambda x: x @ weights[1] + x @ weights[2].t() + F.linear(x, tied)[:, :8], x)
    assert scope.ledger.demand_bytes <= x.numel() * 4
    assert all(value.num_bytes != weights.numel() * 4 for value in scope.trace.values)
    held_bytes = scope.ledger.held_bytes
    y.sum().backward()
    assert weights.grad is not None and x.grad is not None
    assert held_bytes <= x.numel() * 4  # nothing but x, which needs a gradient as well


def test_a_changed_parameter_raises(make: Make):
    w = nn.Parameter(torch.randn(8, 8))
    x = leaf(6, 8)
    scope = make(KEEP, w)
    with scope.open():
        loss = (x @ w).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Tagged(torch.Tensor):
    """A subclass, as DTensor is one."""


@pytest.mark.parametrize("strategy", ALL)
def test_subclasses_are_kept_and_counted(make: Make, strategy: Strategy):
    x = torch.randn(6, 8).as_subclass(Tagged).requires_grad_()
    scope = make(strategy)
    with scope.open():
        loss = scope.run(A, lambda x: (x * x).sum(), x)
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    assert scope.ledger.num_unmanaged > 0


def test_inference_tensors_may_go_in(make: Make):
    """Features of a frozen encoder; autograd itself refuses to save them, so they only pass through."""
    with torch.inference_mode():
        features = torch.randn(6, 8)
    bias = leaf(8)
    scope = make(RECOMPUTE)
    with scope.open():
        y = scope.run(A, lambda features, bias: (features + bias).clone(), features, bias)
        loss = scope.run(B, lambda y: (y.sin()).sum(), y)
    loss.backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, (features + bias.detach()).cos().sum(0))


# Many runs, no runs


def test_a_module_that_runs_twice(make: Make):
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    parameters = list(module.parameters())

    def step(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        module.zero_grad(set_to_none=True)
        x = leaf(6, 8)
        y = run(A, module, run(A, module, x))
        (y * y).sum().backward()
        return [tensor.grad.clone() for tensor in (x, *parameters) if tensor.grad is not None]

    wanted = step(lambda site, function, *args: function(*args))
    for strategy in EXACT:
        scope = make(strategy, *parameters)
        with scope.open():
            got = step(scope.run)
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    assert len(wanted) == 3


@pytest.mark.parametrize("strategy", ALL)
def test_no_packs_without_gradients(make: Make, strategy: Strategy):
    x = leaf(6, 8)
    scope = make(strategy)
    with scope.open(), torch.no_grad():
        y = scope.run(BLOCK, lambda x: scope.run(A, torch.sin, x), x)
    assert scope.ledger.demand_bytes == scope.ledger.held_bytes == scope.ledger.num_recomputes == 0
    assert not y.requires_grad


@pytest.mark.parametrize("strategy", ALL)
def test_flat_over_many_steps(make: Make, strategy: Strategy):
    """Nothing of a finished step is alive in the next one, without the cyclic collector."""
    linear = nn.Linear(32, 32)
    seen: list[weakref.ref[torch.Tensor]] = []
    num_alive = []
    for _ in range(20):
        x = torch.randn(16, 32)
        scope = make(strategy, *linear.parameters())
        with scope.open():
            h = scope.run(A, linear, x)
            y = scope.run(BLOCK, lambda h, scope=scope: scope.run(B, torch.tanh, h).exp(), h)
            loss = (y * y).sum()
        seen += [weakref.ref(x), weakref.ref(h), weakref.ref(y), weakref.ref(loss)]
        loss.backward()
        del x, h, y, loss, scope
        num_alive.append(sum(reference() is not None for reference in seen))
    assert num_alive == [0] * 20


def test_zero_rows(make: Make):
    """No token for an expert: every strategy passes tensors without rows."""
    for strategy in ALL:
        x = leaf(0, 8)
        scope = make(strategy)
        with scope.open():
            loss = scope.run(B, lambda y: (y * y).sum(), scope.run(A, torch.sin, x))
        loss.backward()
        assert x.grad is not None and x.grad.shape == (0, 8)


def test_nested_arguments_and_results(make: Make):
    """Operators take and give tuples, dictionaries and keywords; a dictionary changed in place is the caller's."""

    def operator(pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *, scale: float, seen: dict[str, torch.Tensor]):
        x, others = pair
        y = (x * others["gain"]).sin() * scale
        seen["y"] = y
        return {"y": y, "both": [y, x.exp()]}

    def step(run: Callable[..., dict]) -> list[torch.Tensor]:
        x, gain = leaf(6, 8), leaf(8, seed=1)
        seen: dict[str, torch.Tensor] = {}
        out = run(A, operator, (x, {"gain": gain}), scale=0.5, seen=seen)
        ((out["y"] * out["both"][1]) ** 2 + seen["y"] ** 2).sum().backward()
        assert seen["y"] is out["y"] and x.grad is not None and gain.grad is not None
        return [x.grad, gain.grad]

    wanted = step(lambda site, function, *args, **kwargs: function(*args, **kwargs))
    for strategy in EXACT:
        scope = make(strategy)
        with scope.open():
            got = step(scope.run)
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_a_custom_function_that_asks_twice_for_what_it_saved(make: Make):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
            return grad * (first + second)

    for strategy in EXACT:
        x = leaf(6, 8)
        scope = make(strategy)
        with scope.open():
            loss = scope.run(B, Square.apply, scope.run(A, torch.sin, x)).sum()
        loss.backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * x.detach().sin() * x.detach().cos())
        del loss
        assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0
