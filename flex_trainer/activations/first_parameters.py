"""The parameters of a module, as the first run of an operator found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from flex_trainer.activations.aside import changing
from flex_trainer.activations.guarded_parameters import Guard, parameters_changed
from flex_trainer.activations.identity import local_part
from flex_trainer.activations.model_tensors import modules_of

_ANY_VERSION = -1
"""In place of a version that the first run itself has moved."""


class _First(NamedTuple):
    """One parameter. Its storage is held, so that the address stays its own."""

    parameter: torch.Tensor
    is_trained: bool
    storage: torch.UntypedStorage
    offset: int
    version: int


class FirstParameters:
    """What is checked of the parameters in a module, and given back to a recomputation."""

    __slots__ = ("_first", "_module")

    def __init__(self, module: nn.Module, parts: list[nn.Module]) -> None:
        """`parts`: all modules in `module`."""
        self._module = module
        self._first = [_first(parameter) for parameter in _parameters_of(parts)]

    def note_first_run(self) -> None:
        """The first run has ended. A parameter whose version it moved is checked for its storage alone from now on:
        parametrizations (PEFT's adapters on fused experts) set a parameter anew, to the same numbers, around each run.
        """
        found = _parameters_of(parts_of(self._module))
        if len(found) == len(self._first) and all(map(_is_same, found, self._first)):
            return
        versions = {_place(parameter): _local(parameter)._version for parameter in found}
        self._first = [
            one if versions.get((one.storage._cdata, one.offset)) == one.version else one._replace(version=_ANY_VERSION)
            for one in self._first
        ]

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Run with the parameters trained that were, and with an error when one is read that has changed.

        Raises:
            RuntimeError: there are fewer parameters than there were; while the context lasts: one that has changed is
                read.
        """
        found = _parameters_of(parts_of(self._module))
        trained = [parameter.requires_grad for parameter in found]
        guards: list[Guard] = []
        if len(found) == len(self._first) and all(map(_is_same, found, self._first)):
            wanted = [one.is_trained for one in self._first]
        else:
            guards, wanted = self._guards(name), self._trained_in_first_run(found)
        is_changed = bool(guards) or wanted != trained
        try:
            for guard in guards:
                guard.install()
            _set_trained(found, wanted)
            with changing(None) if is_changed else nullcontext():
                yield
        finally:
            for guard in guards:
                guard.remove()
            _set_trained(found, trained)

    def _guards(self, name: str) -> list[Guard]:
        versions = {(one.storage._cdata, one.offset): one.version for one in self._first}
        guards, places = [], set()
        for path, part in self._module.named_modules():
            parameters = {key: parameter for key, parameter in part._parameters.items() if parameter is not None}
            places.update(map(_place, parameters.values()))
            changed = {
                key: f"{path}.{key}".removeprefix(".")
                for key, parameter in parameters.items()
                if versions.get(_place(parameter)) not in (_local(parameter)._version, _ANY_VERSION)
            }
            if changed:
                guards.append(Guard(part, changed, name))
        if not guards and not versions.keys() <= places:
            raise parameters_changed(f"the parameters of {name}")  # there are fewer than there were
        return guards

    def _trained_in_first_run(self, found: list[torch.Tensor]) -> list[bool]:
        """Which parameters were trained: by parameter where they are the same ones, else in order (as under FSDP2)."""
        by_parameter = {id(one.parameter): one.is_trained for one in self._first}
        has_all = len(found) == len(self._first)
        in_order = [one.is_trained for one in self._first] if has_all else [p.requires_grad for p in found]
        return [by_parameter.get(id(p), is_trained) for p, is_trained in zip(found, in_order, strict=True)]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """All modules in a module, itself first."""
    return modules_of(module) if module._modules else [module]


def _parameters_of(parts: list[nn.Module]) -> list[torch.Tensor]:
    return [parameter for part in parts for parameter in part._parameters.values() if parameter is not None]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter if type(parameter) is nn.Parameter else local_part(parameter)


def _set_trained(parameters: list[torch.Tensor], trained: list[bool]) -> None:
    for parameter, is_trained in zip(parameters, trained, strict=True):
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


def _first(parameter: torch.Tensor) -> _First:
    local = _local(parameter)
    storage, offset = local.untyped_storage(), int(local.storage_offset())
    return _First(parameter, parameter.requires_grad, storage, offset, local._version)


def _place(parameter: torch.Tensor) -> tuple[int, int]:
    local = _local(parameter)
    return local.untyped_storage()._cdata, int(local.storage_offset())


def _is_same(parameter: torch.Tensor, one: _First) -> bool:
    """Whether a parameter is the very one, as it was."""
    if parameter is not one.parameter:
        return False
    local = _local(parameter)
    return (
        local._version == one.version
        and local.untyped_storage()._cdata == one.storage._cdata
        and local.storage_offset() == one.offset
    )
