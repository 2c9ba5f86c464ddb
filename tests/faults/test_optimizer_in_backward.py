"""Optimizers that write a weight as soon as its gradient is there (layerwise GaLore, LOMO), under every strategy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction, Choose, instrumented
from flex_trainer.testing.tiny import tiny_batch
from tests.faults.outcomes import EXACT, outcome
from tests.faults.small_models import Forward, small
from tests.tiers import first_quick

EXPERT_PARTS = ("expert_permute", "expert_up", "expert_activation", "expert_down", "expert_unpermute")


def write_in_backward(model: nn.Module) -> None:
    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def weights_after(architecture: str, choose: Choose | None) -> dict[str, torch.Tensor]:
    """After three steps of two forwards each, one backward for each."""
    model = small(architecture)
    write_in_backward(model)
    inputs = {**tiny_batch(model, 2, 10), "use_cache": False}

    def body(forward: Forward) -> list[torch.Tensor]:
        for _ in range(3):
            forward(**inputs).loss.backward()
        return []

    if choose is None:
        outcome(model, body)
    else:
        with instrumented(model):
            outcome(model, body, choose)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def only(*kinds: str) -> Choose:
    return lambda site: Strategy.RECOMPUTE if site.kind in kinds else Strategy.KEEP


def by_chance(seed: int) -> Choose:
    """Keep, recompute or offload each kind of operator."""
    choices = (Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD)
    return lambda site: random.Random(f"{seed} {site.kind}").choice(choices)


@pytest.mark.parametrize("architecture", first_quick(["deepseek_v3", "gpt_oss", "mixtral"]))
def test_weights_are_those_of_plain_training(architecture: str) -> None:
    plain = weights_after(architecture, None)
    chosen = {**EXACT, **{kind: only(kind) for kind in (*EXPERT_PARTS, "attention_core", "linear", "norm", "experts")}}
    chosen |= {"permute and up": only("expert_permute", "expert_up"), **{f"{n}": by_chance(n) for n in range(4)}}
    for name, choose in chosen.items():
        got = weights_after(architecture, choose)
        unequal = [key for key, weight in plain.items() if not torch.equal(got[key], weight)]
        assert not unequal, f"{name}: {unequal[:3]}"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)


def written(names: tuple[str, ...], read: Callable[[Two, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Gradient through a part of a module of which some parameters are written before its recompute."""
    torch.manual_seed(0)
    module, x = Two(), torch.randn(4, 8, requires_grad=True)
    everything = ByFunction(lambda site: Strategy.RECOMPUTE)
    scope = Scope(everything, Ledger(), parameters=module.parameters(), modules={"two": module})
    with scope.open():
        y = scope.run(Site("two.part", "linear", 0), lambda x: read(module, x).exp().sin(), x)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.add_(1.0)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_part_is_held_to_the_parameters_that_it_reads() -> None:
    expected = written((), lambda module, x: module.first(x))
    got = written(("second.weight", "second.bias"), lambda module, x: module.first(x))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["first.weight", "first.bias"])
@pytest.mark.parametrize(
    "read",
    [
        lambda module, x: module.first(x),
        lambda module, x: x @ dict(module.named_parameters())["first.weight"],
        lambda module, x: x @ next(module.first.parameters()),
    ],
)
def test_the_message_names_the_parameter_that_was_written(name: str, read: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"parameter {name} of two.part changed between forward and backward"):
        written((name,), read)
