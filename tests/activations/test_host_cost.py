"""What the engine does per operator and per saved tensor, in counts: times would say more of the machine than of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flex_trainer.activations import context, host_random, quantize, region
from flex_trainer.activations.collector import collector_paused
from flex_trainer.activations.host_random import HostRandom
from flex_trainer.activations.known import KnownForward
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.module_state import ModuleState
from flex_trainer.activations.overhead import recompute_overhead_seconds
from flex_trainer.activations.quick_state import QuickState, state_of
from flex_trainer.activations.scope import Scope
from flex_trainer.bench.host import collector
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction

NUM_LAYERS = 12
A, B = Site("a", "linear", 0), Site("b", "linear", 0)


class CountingScope(Scope):
    """Counts the calls that autograd makes into Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_packs = self.num_unpacks = 0

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.num_packs += 1
        return super()._pack(tensor)

    def _pack_sentinel(self, tensor: torch.Tensor) -> Any:
        self.num_packs += 1
        return super()._pack_sentinel(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        self.num_unpacks += 1
        return super()._unpack(packed)


def layer(number: int) -> Site:
    return Site(f"layers.{number}", "layer", number, is_block=True, is_recomputable=False)


def forward(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    """An embedding, layers of two operators, and a loss."""
    h = scope.run(Site("embedding", "embedding", -1), torch.sin, x)
    for number in range(NUM_LAYERS):
        inside = [Site(f"layers.{number}.{name}", "linear", number) for name in "ab"]

        def block(h: torch.Tensor, inside: list[Site] = inside) -> torch.Tensor:
            return scope.run(inside[1], torch.exp, scope.run(inside[0], torch.sin, h)) * h

        h = scope.run(layer(number), block, h)
        scope.sweep()
    return scope.run(Site("loss", "loss", -1), lambda h: (h * h).sum(), h)


def measured() -> tuple[int, list[int], torch.Tensor]:
    """Bytes held at the end of forward and after each layer when every tensor is looked at, and the gradient."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scope = CountingScope(ByFunction(lambda site: Strategy.KEEP), Ledger(), parameters=())
    after: list[int] = []
    sweep = scope.sweep

    def swept() -> None:
        sweep()
        after.append(scope.ledger.held_bytes)

    scope.sweep = swept  # type: ignore[method-assign]
    with scope.open():
        loss = forward(scope, x)
    held_bytes = scope.ledger.held_bytes
    loss.backward()
    assert scope.num_packs > 4 * NUM_LAYERS and x.grad is not None
    return held_bytes, after[:NUM_LAYERS], x.grad


def known_scope(choose: Callable[[Site], Strategy] = lambda site: Strategy.KEEP) -> CountingScope:
    held_bytes, after, _ = measured()
    known = KnownForward(held_bytes, lambda number: after[number] if 0 <= number < len(after) else 0)
    return CountingScope(ByFunction(choose), Ledger(), parameters=(), known=known)


def test_a_known_forward_does_nothing_for_its_layers() -> None:
    """Calls from autograd: those of the embedding and the loss, however many layers there are."""
    held_bytes, _, wanted = measured()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scope = known_scope()
    with scope.open():
        loss = forward(scope, x)
    assert scope.num_packs == 2 * (1 + 1) - 1  # sin saves x; the product saves both of its arguments
    assert not scope.trace.calls and not scope.trace.values and not scope.is_traced
    assert [site.name for site in scope.sites[:3]] == ["embedding", "layers.0", "layers.0.a"]
    assert scope.ledger.held_bytes == scope.ledger.demand_bytes == held_bytes
    loss.backward()
    assert scope.num_unpacks == scope.num_packs and scope.was_used
    assert x.grad is not None and torch.equal(x.grad, wanted)
    del loss
    assert scope.ledger.held_bytes == 0


def test_a_known_forward_counts_layer_by_layer_and_lives_as_long_as_its_graph() -> None:
    held_bytes, after, _ = measured()
    seen = []
    x = torch.randn(4, 4, requires_grad=True)
    scope = known_scope()
    sweep = scope.sweep

    def swept() -> None:
        sweep()
        seen.append(scope.ledger.held_bytes)

    scope.sweep = swept  # type: ignore[method-assign]
    with scope.open():
        loss = forward(scope, x)
    assert seen[:NUM_LAYERS] == after
    torch.autograd.grad(loss, x, retain_graph=True)
    assert scope.ledger.held_bytes == held_bytes  # the graph may be asked again
    torch.autograd.grad(loss, x)
    assert scope.ledger.held_bytes == 0


def test_a_known_forward_without_a_backward_holds_nothing() -> None:
    scope = known_scope()
    with scope.open():
        loss = forward(scope, torch.randn(4, 4, requires_grad=True))
    assert scope.ledger.held_bytes > 0
    del loss
    assert scope.ledger.held_bytes == 0 and not scope.was_used


def test_an_error_in_a_known_forward_names_the_operator_and_leaves_nothing() -> None:
    scope = known_scope()

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError) as caught, scope.open():
        h = scope.run(A, torch.sin, torch.randn(4, 4, requires_grad=True))
        scope.run(layer(0), lambda h: scope.run(B, fail, h), h)
    caught.value.__traceback__ = None
    del h
    place = scope._whereabouts.at
    assert place is not None and (place.phase, place.operator) == ("forward", "b")
    assert scope.ledger.held_bytes == 0


@pytest.mark.parametrize("strategy", [Strategy.KEEP, Strategy.RECOMPUTE])
def test_a_known_forward_that_begins_to_mitigate(strategy: Strategy) -> None:
    """What ran before stays as autograd holds it; operators that run later have their strategies."""
    held_bytes, after, wanted = measured()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    half = NUM_LAYERS // 2
    scope = known_scope(lambda site: strategy if site.kind == "linear" and site.layer >= half else Strategy.KEEP)
    sweep, num_layers = scope.sweep, 0

    def swept() -> None:
        nonlocal num_layers
        sweep()
        num_layers += 1
        if num_layers == half:
            scope.watch()

    scope.sweep = swept  # type: ignore[method-assign]
    with scope.open():
        loss = forward(scope, x)
    assert scope.is_watching and not scope.is_traced
    assert {call.site.layer for call in scope.calls} == {*range(half, NUM_LAYERS), -1}
    later_bytes = scope.ledger.held_bytes - after[half - 1]
    if strategy is Strategy.RECOMPUTE:
        assert scope.ledger.freed_bytes["recompute"] > 0
        assert later_bytes < held_bytes - after[half - 1]
    else:
        # What the first half made and the second saves again is counted once more: it is held by autograd already.
        assert 0 <= later_bytes - (held_bytes - after[half - 1]) <= 64
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, wanted)
    assert (scope.ledger.num_recomputes > 0) is (strategy is Strategy.RECOMPUTE)
    del loss
    assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0


# Recomputed regions


def recompute(module: nn.Module, num_regions: int) -> None:
    sites = [Site(str(number), "linear", 0) for number in range(num_regions)]
    modules = {site.name: module for site in sites}
    scope = Scope(
        ByFunction(lambda site: Strategy.RECOMPUTE), Ledger(), parameters=list(module.parameters()), modules=modules
    )
    h = torch.randn(2, 8, requires_grad=True)
    with scope.open():
        for site in sites:
            h = scope.run(site, module, h)
        loss = h.sum()
    loss.backward()
    assert scope.ledger.num_recomputes == num_regions


def test_host_streams_are_read_once_for_all_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = 0
    getstate = random.getstate

    def counted() -> Any:
        nonlocal num_reads
        num_reads += 1
        return getstate()

    recompute(nn.RMSNorm(8), 1)  # the stream is known from here on
    monkeypatch.setattr(host_random.random, "getstate", counted)
    recompute(nn.Sequential(nn.RMSNorm(8), nn.Tanh()), 10)
    assert num_reads == 0
    random.random()
    recompute(nn.Sequential(nn.RMSNorm(8), nn.Tanh()), 10)
    assert num_reads == 1


def test_a_region_of_plain_tensors_takes_no_pytree_and_no_general_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not for a call with plain tensors")

    monkeypatch.setattr("flex_trainer.activations.leaves.tree_map", refuse)
    monkeypatch.setattr("flex_trainer.activations.leaves.tree_leaves", refuse)
    monkeypatch.setattr(ModuleState, "__init__", refuse)
    monkeypatch.setattr(region.InnerHooks, "first_run", refuse)
    monkeypatch.setattr(region.InnerHooks, "recompute", refuse)
    monkeypatch.setattr(context._Autocasts, "__enter__", refuse)
    recompute(nn.Sequential(nn.RMSNorm(8), nn.Tanh()), 4)


def buffered() -> nn.Module:
    module = nn.Linear(8, 8)
    module.register_buffer("count", torch.zeros(1))
    return module


def listed() -> nn.Module:
    module = nn.Linear(8, 8)
    module.seen = []  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("make", "is_quick"),
    [
        (lambda: nn.Linear(8, 8), True),
        (lambda: nn.Sequential(nn.RMSNorm(8), nn.Dropout(0.1)), True),
        (buffered, False),
        (listed, False),
        (lambda: nn.utils.parametrize.register_parametrization(nn.Linear(8, 8), "weight", nn.Identity()), False),
    ],
)
def test_modules_with_content_are_remembered_in_full(make: Callable[[], nn.Module], is_quick: bool) -> None:
    module = make()
    assert isinstance(state_of(module, list(module.modules())), QuickState) is is_quick


def test_a_quick_state_is_given_to_a_recompute_and_taken_back() -> None:
    linear = nn.Linear(8, 8)
    module = nn.Sequential(linear, nn.Dropout(0.1))
    inner: Any = module[1]
    inner.note, inner.helper = "first", object()
    state = state_of(module, list(module.modules()))
    state.note_first_run()
    inner.p, inner.note, inner.extra = 0.5, "now", 3
    helper = inner.helper = object()
    module.eval()
    linear.weight.requires_grad_(False)
    with state.restored("module"):
        assert (inner.p, inner.note, inner.training) == (0.1, "first", True)
        assert not hasattr(inner, "extra") and inner.helper is helper and linear.weight.requires_grad
        inner.note, inner.made = "in the recomputation", 1
    assert (inner.p, inner.note, inner.extra, inner.training) == (0.5, "now", 3, False)
    assert not hasattr(inner, "made") and not linear.weight.requires_grad
    with torch.no_grad():
        linear.bias.add_(1)
    with state.restored("module"), pytest.raises(RuntimeError, match=r"parameter 0\.bias of module changed"):
        module(torch.zeros(8))
    with state.restored("module"):
        inner(torch.zeros(8))  # what does not read it may run
    module[0] = nn.Linear(8, 8)  # an adapter put in its place
    with state.restored("module"), pytest.raises(RuntimeError, match=r"parameter 0\.weight of module changed"):
        module(torch.zeros(8))


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: np.random.rand(),
        lambda: np.random.normal(),
        lambda: np.random.randint(1000),
    ],
)
def test_every_draw_from_a_host_stream_is_noticed(draw: Callable[[], Any]) -> None:
    """Twice: every second normal number is drawn in advance, and moves nothing but a cache."""
    for _ in range(2):
        before = HostRandom.capture()
        assert HostRandom.capture() is before
        wanted = draw()
        assert HostRandom.capture() is not before
        before.put_back()
        assert draw() == wanted


def test_another_kind_of_numpy_generator_is_followed_too() -> None:
    get, put = np.random.mtrand.get_bit_generator, np.random.mtrand.set_bit_generator
    earlier = get()
    try:
        put(np.random.PCG64(3))
        before = HostRandom.capture()
        wanted = np.random.rand()
        assert HostRandom.capture() is not before
        before.put_back()
        assert np.random.rand() == wanted
    finally:
        put(earlier)


def test_the_overhead_of_a_region_is_measured_and_moves_nothing() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    seconds = recompute_overhead_seconds(torch.device("cpu"))
    assert 1e-6 < seconds < 1.0
    assert torch.equal(torch.get_rng_state(), state)


# The cyclic collector


def test_the_collector_rests_while_tensors_are_looked_at_and_is_left_as_it_was() -> None:
    for is_on in (True, False):
        with collector(is_on):
            with collector_paused():
                with collector_paused():
                    assert not gc.isenabled()
                assert not gc.isenabled()
            assert gc.isenabled() is is_on
            with Scope(ByFunction(lambda site: Strategy.KEEP), Ledger(), parameters=()).open():
                assert not gc.isenabled()
            with known_scope().open():
                assert gc.isenabled() is is_on


# Quantize on a device that the host would wait for


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flex_trainer.activations.mitigation.is_seen_at_once", lambda device: False)


def quantized_forward(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    with scope.open():
        y = scope.run(A, lambda x: x * 1, x)
        return scope.run(B, lambda y: (y * y).sum(), y)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantize_waits_for_nothing_and_what_is_not_finite_comes_back_where_it_was(dtype: torch.dtype) -> None:
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    rows[1, 3:5], rows[2, 0], rows[3, 7] = -torch.inf, torch.inf, torch.nan
    x = rows.clone().requires_grad_()
    non_finite = quantize.NonFinite()

    def scope() -> Scope:
        return Scope(
            ByFunction(lambda site: Strategy.QUANTIZE),
            Ledger(),
            parameters=(),
            quantize_dtype=dtype,
            min_mitigated_bytes=1,
            non_finite=non_finite,
        )

    first = scope()
    with NoWaiting():
        loss = quantized_forward(first, x)
        loss.backward()
    assert first.ledger.freed_bytes["quantize"] > 0 and x.grad is not None
    wanted = 2 * rows
    special = ~torch.isfinite(wanted)
    assert torch.equal(torch.isnan(x.grad), torch.isnan(wanted))
    assert torch.equal(x.grad[special].nan_to_num(nan=0.5), wanted[special].nan_to_num(nan=0.5))
    bound = 2 * rows.masked_fill(special, 0).abs().amax(dim=-1, keepdim=True) / (254 if dtype == torch.int8 else 16)
    assert ((x.grad - wanted).masked_fill(special, 0).abs() <= bound * 1.001).all()
    # The flags are read with the trace, and the next micro-batch keeps the value.
    assert [value.has_infinity for value in first.trace.values] == [False] * len(first.trace.values)  # it holds a NaN
    second = scope()
    x.grad = None
    quantized_forward(second, x).backward()
    assert second.ledger.freed_bytes["quantize"] == 0 and x.grad is not None
    assert torch.equal(x.grad.nan_to_num(nan=0.5), wanted.nan_to_num(nan=0.5))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_infinities_of_a_mask_are_told_from_accidents_after_the_micro_batch() -> None:
    rows = torch.zeros(4, 64)
    rows[:, 32:] = -torch.inf
    scope = Scope(ByFunction(lambda site: Strategy.QUANTIZE), Ledger(), parameters=(), min_mitigated_bytes=1)
    x = rows.clone().requires_grad_()
    quantized_forward(scope, x).backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * rows)
    assert any(value.has_infinity for value in scope.trace.values)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_finite_values_are_as_exact_without_a_look() -> None:
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    codes, scales, flag = quantize.quantize_any_rows(rows, torch.int8)
    wanted, wanted_scales = quantize.quantize_rows(rows, torch.int8)
    assert torch.equal(codes, wanted) and float(flag) == 0.0
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    assert torch.equal(quantize.dequantize_any_rows(codes, scales), codes.float() * scales)
