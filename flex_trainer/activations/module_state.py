"""The module behind an operator, as it was when the operator first ran: a replay must find it so, and leave no trace.

    restored       training flags, which parameters are trained; attributes and buffers: numbers, strings, tensors,
                   random generators, and containers of these, also where forward makes them or takes them away
    only checked   the parameters' data, and large tensors that forward writes into

For a replay, names are bound to the first run's values, or to copies of what the replay may write into, and bound back
afterwards. So the objects themselves are untouched: a counter counts once, a tracker's list grows once, and no version
of a tensor moves. Objects of other kinds (a tracker with methods, say) are the same in both runs.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.identity import local_part
from flex_trainer.snapshot import NOT_STATE

_ANY_VERSION = -1
"""In place of a version that the first run itself has moved."""
SCALARS = frozenset({type(None), bool, int, float, complex, str})
CONTAINERS = frozenset({list, set, deque, dict, defaultdict, OrderedDict, Counter})
_MOST_ITEMS = 4096
"""Longer containers are not remembered as they were at the first run: a replay gets a copy of what they are then."""
_MOST_DEPTH = 4
_MOST_COPIED_BYTES = 64 * 1024
"""Larger tensors are not copied before the first run."""


class ModuleState:
    """What the first run of an operator found."""

    __slots__ = ("_parameters", "_parts", "_trained")

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_Part(part) for part in module.modules()]
        self._parameters = _facts(module)
        self._trained = [parameter.requires_grad for parameter in module.parameters()]

    def note_first_run(self) -> None:
        """The first run has ended. A parameter whose version it moved is checked for its storage alone from now on:
        parametrizations (PEFT's adapters on fused experts) set a parameter anew, to the same numbers, around each run.
        """
        versions = {address: version for _, address, version in _facts(self._parts[0].module)}
        self._parameters = [
            (storage, address, version if versions.get(address) == version else _ANY_VERSION)
            for storage, address, version in self._parameters
        ]

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Run with the state of the first run; what the run changes is taken back.

        Raises:
            RuntimeError: a parameter was exchanged or written to since, or a large tensor among the attributes was
                written to.
        """
        module = self._parts[0].module
        facts, first = _facts(module), self._parameters
        if len(facts) != len(first) or any(
            (a, v) != (b, w) and (a, w) != (b, _ANY_VERSION) for (_, a, v), (_, b, w) in zip(facts, first, strict=True)
        ):
            raise parameters_changed(name)
        parameters = list(module.parameters())
        trained = [parameter.requires_grad for parameter in parameters]
        now = [_Bindings(part.module) for part in self._parts]
        try:
            _set_trained(parameters, self._trained)
            for part in self._parts:
                part.bind(name)
            yield
        finally:
            for part, bindings in zip(self._parts, now, strict=True):
                part.rewind_generators()
                bindings.bind()
            _set_trained(parameters, trained)


def parameters_changed(name: str) -> RuntimeError:
    """The error of a replay that does not find the parameters of the first run."""
    return RuntimeError(
        f"the parameters of {name} changed between forward and backward (an optimizer step, exchanged weights, "
        "functional_call, another adapter): what was dropped cannot be computed again. Run backward before the "
        "change, or leave 'recompute' out of strategies."
    )


class _Part:
    """One module: its own attributes and buffers, before the first run."""

    __slots__ = ("_attributes", "_buffers", "_generators", "_is_training", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_training = module.training
        self._attributes = {name: _Value(value) for name, value in vars(module).items() if name not in NOT_STATE}
        self._buffers = {name: _Value(value) for name, value in module._buffers.items()}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def bind(self, name: str) -> None:
        """Give the module the values of the first run."""
        module, attributes = self.module, vars(self.module)
        module.training = self._is_training
        for key in attributes.keys() - NOT_STATE - self._attributes.keys():
            del attributes[key]
        for key in module._buffers.keys() - self._buffers.keys():
            del module._buffers[key]
        for bound, values in ((attributes, self._attributes), (module._buffers, self._buffers)):
            for key, value in values.items():
                now: Any = bound.get(key)
                found = value.for_replay(now, f"{name} ({key})")
                if found is not _SAME:
                    bound[key] = found
                elif value.stream is not None and isinstance(now, torch.Generator):
                    self._generators.append((now, now.get_state()))
                    now.set_state(value.stream)

    def rewind_generators(self) -> None:
        """Have generators go on as if there had been no replay."""
        while self._generators:
            generator, state = self._generators.pop()
            generator.set_state(state)


_SAME = object()


class _Value:
    """What one name was bound to."""

    __slots__ = ("_content", "_kept", "_version", "stream")

    def __init__(self, value: Any) -> None:
        self._content: Any = _SAME
        self.stream: torch.Tensor | None = None
        """State of a random generator."""
        self._kept: torch.Tensor | None = None
        self._version = 0
        kind = type(value)
        if kind in SCALARS:
            self._content = value
        elif kind in CONTAINERS:
            if _is_settled(value, _MOST_DEPTH):
                self._content = _copied(value, _MOST_DEPTH)
        elif isinstance(value, torch.Generator):
            self.stream = value.get_state()
        elif isinstance(value, torch.Tensor) and value.grad_fn is None and not value.is_inference():
            self._kept, self._version = value, value._version
            if value.numel() * value.element_size() <= _MOST_COPIED_BYTES:
                self._content = value.detach().clone()

    def for_replay(self, now: Any, name: str) -> Any:
        """What to bind the name to in a replay; `_SAME` leaves it. `now` is what it is bound to."""
        if self._kept is not None:
            if self._kept._version == self._version:
                return self._kept
            if self._content is _SAME:
                raise RuntimeError(
                    f"a tensor of {name} was written to between its first run and backward, and is too large to be "
                    "copied each time: what was dropped cannot be computed again. Leave 'recompute' out of strategies, "
                    "or have forward make a new tensor."
                )
            return self._content.clone()
        if type(now) in CONTAINERS and (self._content is _SAME or type(self._content) in CONTAINERS):
            return _copied(now if self._content is _SAME else self._content, _MOST_DEPTH)
        if type(self._content) in CONTAINERS:
            return _copied(self._content, _MOST_DEPTH)
        return self._content if type(self._content) in SCALARS else _SAME


class _Bindings:
    """What a module's names are bound to when a replay begins."""

    __slots__ = ("_attributes", "_buffers", "_is_training", "_module", "_unsaved")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_training = module.training
        self._attributes = {name: value for name, value in vars(module).items() if name not in NOT_STATE}
        self._buffers = dict(module._buffers)
        self._unsaved = set(module._non_persistent_buffers_set)

    def bind(self) -> None:
        module, attributes = self._module, vars(self._module)
        module.training = self._is_training
        for key in attributes.keys() - NOT_STATE - self._attributes.keys():
            del attributes[key]
        attributes.update(self._attributes)
        module._buffers.clear()
        module._buffers.update(self._buffers)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(self._unsaved)


def _is_settled(container: Any, depth: int) -> bool:
    """Whether remembering what is in a container keeps no graph alive, and is cheap."""
    if len(container) > _MOST_ITEMS or depth == 0:
        return False
    items = container.values() if isinstance(container, dict) else container
    return all(
        _is_settled(item, depth - 1) if type(item) in CONTAINERS else getattr(item, "grad_fn", None) is None
        for item in items
    )


def _copied(container: Any, depth: int) -> Any:
    """The container with the containers in it, but not their elements, copied."""
    new = copy.copy(container)
    if depth > 0 and not isinstance(new, set):
        for key, item in list(new.items() if isinstance(new, dict) else enumerate(new)):
            if type(item) in CONTAINERS:
                new[key] = _copied(item, depth - 1)
    return new


def _set_trained(parameters: list[nn.Parameter], trained: list[bool]) -> None:
    for parameter, is_trained in zip(parameters, trained, strict=True):
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


def _facts(module: nn.Module) -> list[tuple[torch.UntypedStorage, int, int]]:
    """For every parameter: its storage (held, so that the address stays its own), the address and the version."""
    return [
        (storage := part.untyped_storage(), storage._cdata, part._version)
        for part in map(local_part, module.parameters())
    ]
