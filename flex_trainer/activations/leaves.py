"""Leaves of nested arguments and results, as torch's pytree lists them, without its cost for what is common.

An operator's arguments are tensors, numbers and None, bare or in a tuple. pytree takes about ten times as long to find
that out, and the engine asks for every run of every operator. Unlike pytree, this looks into `UserDict`s too: in one,
layers of transformers' Gemma 4 hand their keys and values on to later layers.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_SEQUENCES = frozenset({tuple, list})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_OTHERS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_ATOMS = _TENSORS | _OTHERS


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of `tree`, in the order of `torch.utils._pytree.tree_flatten`."""
    if type(tree) in _ATOMS:
        return [tree]
    found: list[Any] = []
    _collect(tree, found)
    return found


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a call's arguments."""
    found: list[Any] = []
    for arg in args:
        if type(arg) in _TENSORS:
            found.append(arg)
        elif type(arg) not in _OTHERS:
            _collect(arg, found)
    for value in kwargs.values():
        if type(value) in _TENSORS:
            found.append(value)
        elif type(value) not in _OTHERS:
            _collect(value, found)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` of each leaf in its place: torch's tree_map, in the order of `leaves_of`."""
    kind = type(tree)
    if kind in _ATOMS:
        return function(tree)
    if kind in _SEQUENCES:
        return kind([mapped(function, item) for item in tree])
    if issubclass(kind, UserDict):
        new = copy.copy(tree)
        new.data = {key: mapped(function, value) for key, value in tree.data.items()}
        return new
    return tree_map(function, tree)


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _ATOMS:
        found.append(tree)
    elif kind in _SEQUENCES:
        for item in tree:
            _collect(item, found)
    elif issubclass(kind, UserDict):
        for item in tree.data.values():
            _collect(item, found)
    else:  # mappings, named tuples, what others registered; and what is a leaf of a kind not named above
        found.extend(tree_leaves(tree))
