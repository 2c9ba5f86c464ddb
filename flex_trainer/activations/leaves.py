"""Leaves of nested arguments and results, as torch's pytree lists them, without its cost for what is common.

An operator's arguments are tensors, numbers and None, bare or in a tuple. pytree takes about ten times as long to find
that out, and the engine asks for every run of every operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_SEQUENCES = frozenset({tuple, list})
_ATOMS = frozenset({type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device})


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of `tree`, in the order of `torch.utils._pytree.tree_flatten`."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a call's arguments."""
    found: list[Any] = []
    _collect(args, found)
    for value in kwargs.values():
        _collect(value, found)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _ATOMS:
        found.append(tree)
    elif kind in _SEQUENCES:
        for item in tree:
            _collect(item, found)
    else:  # mappings, named tuples, what others registered; and what is a leaf of a kind not named above
        found.extend(tree_leaves(tree))
