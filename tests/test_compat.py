"""Private names of the libraries below: they are there, and do what is expected of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from flex_trainer.compat import hooks_of_all_modules, made_parametrizations, parametrizations_are_made, top_pack_hook


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_what_cached_parametrizations_hold_is_read_and_exchanged() -> None:
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Twice())
    assert made_parametrizations() == (0, {})
    with parametrize.cached():
        weight = linear.weight
        num_caching, made = made_parametrizations()
        assert num_caching == 1 and made[id(linear), "weight"] is weight
        with parametrizations_are_made(0, {}):
            assert linear.weight is not weight
        assert linear.weight is weight
    other = torch.ones(2, 2)
    with parametrizations_are_made(1, {(id(linear), "weight"): other}):
        assert linear.weight is other
    assert made_parametrizations() == (0, {})


def test_the_innermost_pack_hook_is_seen() -> None:
    def outer(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert top_pack_hook() is None
    with saved_tensors_hooks(outer, outer):
        assert top_pack_hook() is outer


def test_hooks_of_all_modules_are_listed() -> None:
    def hook(module: nn.Module, *_: object) -> None: ...

    handle = nn.modules.module.register_module_forward_hook(hook)
    assert hooks_of_all_modules() == [hook]
    handle.remove()
