"""Modules that keep nothing but numbers, strings and objects of their own: a recomputation finds them as they were at
once.

That is nearly every module. `ModuleState` copies what could change inside of tensors, containers and generators; here
there is nothing of that kind, so all that a module holds is compared by identity, which takes a microsecond.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flex_trainer.activations.aside import changing
from flex_trainer.activations.first_parameters import FirstParameters
from flex_trainer.activations.module_state import SCALARS, Bindings, ModuleState
from flex_trainer.module_values import CONTAINERS, NOT_STATE


def state_of(module: nn.Module, parts: list[nn.Module]) -> ModuleState | QuickState:
    """What the first run of an operator finds. `parts`: all modules in `module`."""
    return QuickState(module, parts) if all(map(_is_quick, parts)) else ModuleState(module, parts)


def _is_quick(part: nn.Module) -> bool:
    if part._buffers or "parametrizations" in part._modules:
        return False
    for parameter in part._parameters.values():
        if parameter is not None and type(parameter) not in (nn.Parameter, DTensor):
            return False
    attributes = vars(part)
    for name in attributes.keys() - NOT_STATE:
        value = attributes[name]
        if type(value) in CONTAINERS or isinstance(value, (torch.Tensor, torch.Generator)):
            return False
    return True


class QuickState:
    """Attributes, training flags and parameters of modules, when an operator first ran."""

    __slots__ = ("_attributes", "_parameters", "_parts")

    def __init__(self, module: nn.Module, parts: list[nn.Module]) -> None:
        """`parts`: all modules in `module`."""
        self._parts = parts
        self._attributes = [dict(vars(part)) for part in parts]
        self._parameters = FirstParameters(module, parts)

    def note_first_run(self) -> None:
        """The first run has ended."""
        self._parameters.note_first_run()

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Run with the state of the first run; what the run changes is rolled back.

        Raises:
            RuntimeError: a parameter that the run reads was exchanged or written to since.
        """
        change = _Restored(self._parts, self._attributes)
        with changing(change):
            try:
                change.begin()
                with self._parameters.restored(name):
                    yield
            finally:
                change.end()


class _Restored:
    """Modules with the attributes of a first run."""

    __slots__ = ("_first", "_found", "_own", "_parts")

    def __init__(self, parts: list[nn.Module], first: list[dict[str, Any]]) -> None:
        self._parts = parts
        self._first = first
        self._found: list[_Found] = []
        self._own: list[Bindings] = []

    def begin(self) -> None:
        self._found = [_Found(part, first) for part, first in zip(self._parts, self._first, strict=True)]
        for part, first, found in zip(self._parts, self._first, self._found, strict=True):
            # The first run found no buffers; some made since (a cache, say) are put aside.
            found.take_buffers(part)
            if found.attributes is not None:
                _bind(part, _for_recompute(first, found.attributes))

    def end(self) -> None:
        for part, first, found in zip(self._parts, self._first, self._found, strict=True):
            found.give_back(part, first)

    def put_aside(self) -> None:
        """What the recomputation has bound so far is kept in its turn."""
        own = [Bindings(part) for part in self._parts]
        self.end()
        self._own = own

    def take_up(self) -> None:
        self._found = [_Found(part, first) for part, first in zip(self._parts, self._first, strict=True)]
        for bindings in self._own:
            bindings.bind()


class _Found:
    """What one module's names are bound to when a recomputation begins."""

    __slots__ = ("_buffers", "_unsaved", "attributes")

    def __init__(self, part: nn.Module, first: dict[str, Any]) -> None:
        self.attributes = None if _is_same(vars(part), first) else dict(vars(part))
        """None: as in the first run."""
        self._buffers = dict(part._buffers)
        self._unsaved = set(part._non_persistent_buffers_set)

    def take_buffers(self, part: nn.Module) -> None:
        if self._buffers:
            part._buffers.clear()

    def give_back(self, part: nn.Module, first: dict[str, Any]) -> None:
        wanted = first if self.attributes is None else self.attributes
        if part._buffers:
            part._non_persistent_buffers_set.difference_update(part._buffers)
            part._buffers.clear()
        if not _is_same(vars(part), wanted):
            _bind(part, wanted)
        if self._buffers:
            part._buffers.update(self._buffers)
            part._non_persistent_buffers_set.update(self._unsaved)


def _is_same(now: dict[str, Any], first: dict[str, Any]) -> bool:
    return (
        len(now) == len(first) and all(map(operator.is_, now.values(), first.values())) and now.keys() == first.keys()
    )


def _for_recompute(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a module holds in a recomputation: numbers and strings of the first run, and objects as they are now."""
    bound = {name: value for name, value in now.items() if name in NOT_STATE or name in first}
    bound.update((name, value) for name, value in first.items() if name not in NOT_STATE and type(value) in SCALARS)
    bound["training"] = first["training"]
    return bound


def _bind(part: nn.Module, wanted: dict[str, Any]) -> None:
    """Bind a module's own names, and its training flag, as in `wanted`."""
    attributes = vars(part)
    for name in attributes.keys() - NOT_STATE - wanted.keys():
        del attributes[name]
    attributes.update((name, value) for name, value in wanted.items() if name not in NOT_STATE or name == "training")
