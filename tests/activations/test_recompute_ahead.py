"""Regions that are recomputed before backward asks for their values: the same gradients, once each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import EP_BLOCK, Site, Strategy
from flex_trainer.testing.steps import ByFunction

ROOM = 2**30


def scope() -> Scope:
    return Scope(ByFunction(lambda site: Strategy.RECOMPUTE), Ledger(), parameters=[], min_mitigated_bytes=1)


def step(x: torch.Tensor, one: Scope, look: Callable[[], None], kind: str = "norm") -> torch.Tensor:
    """Three operators of layer 0 and one of layer 1, all recomputed; `look` is called as backward comes to layer 1."""
    sites = [Site("first", kind, 0), Site("second", "norm", 0), Site("third", "norm", 0), Site("later", "norm", 1)]
    with one.open():
        y = one.run(sites[0], lambda x: (x * x).sin(), x)
        y = one.run(sites[1], lambda y: (y * torch.rand_like(y)).exp(), y)
        z = one.run(sites[2], lambda y: (y * y).cos(), y)
        w = one.run(sites[3], lambda z: z.tanh() * z, z)
    w.register_hook(lambda gradient: look())
    return w.sum()


def gradient(look: Callable[[Scope], None], kind: str = "norm") -> tuple[torch.Tensor, Scope]:
    torch.manual_seed(3)
    one = scope()
    x = torch.linspace(-1, 1, 4096).requires_grad_()
    step(x, one, lambda: look(one), kind).backward()
    assert x.grad is not None
    assert (one.ledger.held_bytes, one.ledger.recovered_bytes) == (0, 0)
    return x.grad, one


def test_gradients_are_the_same_and_nothing_runs_twice() -> None:
    plain, without = gradient(lambda one: None)
    taken: list[bool] = []

    def take_all(one: Scope) -> None:
        taken.append(one.recompute_ahead(0, "later", ROOM))
        while taken[-1]:
            taken.append(one.recompute_ahead(0, "later", ROOM))

    ahead, with_it = gradient(take_all)
    assert torch.equal(plain, ahead)
    assert sum(taken) >= 1
    assert with_it.ledger.num_recomputes == without.ledger.num_recomputes


def test_the_random_stream_is_left_alone() -> None:
    def take(one: Scope) -> None:
        before = torch.get_rng_state()
        assert one.recompute_ahead(0, "later", ROOM)
        assert torch.equal(before, torch.get_rng_state())

    gradient(take)


@pytest.mark.parametrize("num_bytes", [0, 4096])
def test_what_has_no_room_waits(num_bytes: int) -> None:
    def take(one: Scope) -> None:
        assert not one.recompute_ahead(0, "later", num_bytes)

    gradient(take)


def test_other_layers_are_left_alone() -> None:
    gradient(lambda one: None if not one.recompute_ahead(7, "later", ROOM) else pytest.fail("there is no layer 7"))


def test_what_other_ranks_take_part_in_is_never_run_ahead() -> None:
    """Neither a dispatch nor what would have to run one for its inputs."""
    recomputed: list[str] = []

    def take(one: Scope) -> None:
        while one.recompute_ahead(0, "later", ROOM):
            recomputed.append("one")

    plain, without = gradient(lambda one: None, EP_BLOCK)
    ahead, with_it = gradient(take, EP_BLOCK)
    assert torch.equal(plain, ahead) and recomputed == []
    assert with_it.ledger.num_recomputes == without.ledger.num_recomputes == 4
