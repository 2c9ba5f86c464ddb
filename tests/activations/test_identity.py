"""Views, storages and in-place changes: what was saved is known exactly, and comes back as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flex_trainer.activations.identity import StorageTable, is_plain
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


# Views

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[1:],
    "transpose": lambda x: x.t(),
    "stride": lambda x: x[:, ::2],
    "column": lambda x: x[:, 1],
    "expand": lambda x: x[:, :1].expand(-1, 7),
    "broadcast": lambda x: x[0].expand(5, -1),
    "reshape": lambda x: x.view(2, 3, 8),
    "permute": lambda x: x.view(2, 3, 8).permute(2, 0, 1),
    "diagonal": lambda x: x.diagonal(),
    "scalar": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
    "overlap": lambda x: x.unfold(1, 4, 2),
    "real of complex": lambda x: torch.view_as_complex(x.view(6, 4, 2)).real,
}


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_an_output(make: Make, strategy: Strategy, view: str):
    def step(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = leaf(6, 8)
        y = run(A, torch.tanh, x)
        shown = VIEWS[view](y)
        (shown * shown.detach().cos() * shown).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = step(lambda site, function, *args: function(*args))
    scope = make(strategy)
    with scope.open():
        got = step(scope.run)
    assert_close_enough(strategy, got, wanted)
    assert scope.ledger.held_bytes == scope.ledger.recovered_bytes == 0


@pytest.mark.parametrize("strategy", ALL)
def test_a_view_of_the_input_is_an_output(make: Make, strategy: Strategy):
    x = leaf(6, 8)
    scope = make(strategy)
    with scope.open():
        h = scope.run(A, torch.sin, x)
        shown = scope.run(B, lambda h: h[1:].t(), h)
        loss = (shown * shown).sum()
    loss.backward()
    wanted = torch.zeros_like(x)
    with torch.no_grad():
        wanted[1:] = 2 * x[1:].sin() * x[1:].cos()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted, rtol=0.05, atol=0.05 if strategy is QUANTIZE else 1e-6)


@pytest.mark.parametrize("strategy", ALL)
def test_conjugates_and_negations_are_seen_through(make: Make, strategy: Strategy):
    """A lazy conjugate shares its storage with the original and holds other numbers than it shows."""

    def step(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = leaf(6, 8)
        z = run(A, lambda x: torch.view_as_complex(x.view(6, 4, 2)) * 2, x)
        c = z.conj()
        (c * c * z + c.imag).abs().sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = step(lambda site, function, *args: function(*args))
    scope = make(strategy)
    with scope.open():
        assert_close_enough(strategy, step(scope.run), wanted)


def test_what_is_plain():
    x = torch.zeros(2, 2, dtype=torch.complex64)
    assert is_plain(x) and is_plain(nn.Parameter(x)) and is_plain(x[1:].t())
    assert not is_plain(x.conj()) and not is_plain(x.conj().imag)
    assert not is_plain(torch.zeros(2).to_sparse())
    with torch.inference_mode():
        assert not is_plain(torch.zeros(2))


# Identity


def test_storages_that_reuse_an_address_are_told_apart(make: Make):
    """Temporaries of one size, one after the other, get the same address from the allocator."""
    x = leaf(64, 64)
    addresses = set()
    scope = make(lambda site: RECOMPUTE if site.name == "a" else KEEP)
    with scope.open():
        total = x.sum() * 0
        for number in range(20):
            temporary = scope.run(A, torch.mul, x, float(number))
            addresses.add(temporary.data_ptr())
            total = total + scope.run(B, lambda t: t.sum(), temporary)
            del temporary
            kept = x.detach() * number  # not an output of anything: must not be taken for the temporary
            addresses.add(kept.data_ptr())
            total = total + (x * kept).sum()
    total.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, sum(range(20)) * (1 + x.detach()))
    assert len(addresses) < 40  # the premise


def test_table_forgets_the_dead_and_only_them():
    table: StorageTable[str] = StorageTable()
    kept, dead = torch.zeros(4), torch.zeros(4)
    table.put(kept.untyped_storage(), "kept")
    table.put(dead.untyped_storage(), "dead")
    assert table.get(kept[1:].untyped_storage()) == "kept"
    assert table.get(torch.zeros(4).untyped_storage()) is None
    del dead
    for _ in range(50):  # the address of a dead storage's header is not given out while it is remembered
        assert table.get(torch.zeros(4).untyped_storage()) is None
    table.sweep(lambda item: True)
    assert list(table) == ["kept"]


@pytest.mark.parametrize("strategy", ALL)
def test_a_storage_saved_often_counts_once(make: Make, strategy: Strategy):
    x = leaf(32, 32)
    scope = make(strategy)
    with scope.open():
        y = scope.run(A, torch.mul, x, 2.0)
        loss = sum(scope.run(B, lambda y: y * y.t(), y).sum() for _ in range(3))
        del y
    assert scope.ledger.demand_bytes <= 2 * x.numel() * 4
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert scope.ledger.held_bytes == 0


# Changes in place


@pytest.mark.parametrize("strategy", ALL)
def test_change_in_place_after_saving_raises(make: Make, strategy: Strategy):
    x = leaf(6, 8)
    scope = make(strategy)
    with scope.open():
        y = scope.run(A, lambda x: x * 3, x)
        loss = scope.run(B, lambda y: (y * y).sum(), y)
        y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strategy", ALL)
def test_change_in_place_of_an_operators_own_result_raises(make: Make, strategy: Strategy):
    x = leaf(6, 8)
    scope = make(strategy)
    with scope.open():
        y = scope.run(A, torch.exp, x)  # saves its result
        y.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("strategy", ALL)
def test_change_in_place_before_saving_is_right(make: Make, strategy: Strategy):
    """The value of a recomputed output is the changed one, which no recomputation gives: it is kept."""

    def step(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = leaf(6, 8)
        y = run(A, lambda x: x * 3, x)
        y.mul_(2)
        run(B, lambda y: (y * y).sum(), y).backward()
        assert x.grad is not None
        return x.grad

    wanted = step(lambda site, function, *args: function(*args))
    scope = make(strategy)
    with scope.open():
        assert_close_enough(strategy, step(scope.run), wanted)


def test_an_operator_that_changes_its_input_is_not_recomputed(make: Make):
    def double_in_place(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    x = leaf(6, 8)
    scope = make(RECOMPUTE)
    with pytest.raises(RuntimeError, match="a changes one of its inputs in place"), scope.open():
        scope.run(A, double_in_place, x * 1)
    scope = make(KEEP)
    with scope.open():
        loss = scope.run(A, double_in_place, x * 1).sum()
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).cos())
