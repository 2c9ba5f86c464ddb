"""The module behind an operator, as it was when the operator first ran: a recomputation must find it so, and leave no
trace.

    restored       training flags, which parameters are trained; attributes and buffers: numbers, strings, tensors,
                   random generators, and containers of these, also where forward makes them or takes them away
    only checked   the parameters' data, and large tensors that forward writes into

For a recomputation, names are bound to the first run's values, or to copies of what the recomputation may write into,
and bound back afterwards. So the objects themselves are untouched: a counter counts once, a tracker's list grows once,
and no version of a tensor moves. Objects of other kinds (a tracker with methods, say) are the same in both runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.aside import changing
from flex_trainer.activations.first_parameters import FirstParameters
from flex_trainer.module_values import CONTAINERS, MAX_ITEMS, NOT_STATE, SMALL_BYTES

SCALARS = frozenset({type(None), bool, int, float, complex, str})
_MOST_DEPTH = 4


class ModuleState:
    """Attributes, buffers, training flags and parameters of a module, when an operator first ran."""

    __slots__ = ("_parameters", "_parts")

    def __init__(self, module: nn.Module, parts: list[nn.Module]) -> None:
        """`parts`: all modules in `module`."""
        self._parts = [_Part(part) for part in parts]
        self._parameters = FirstParameters(module, parts)

    def note_first_run(self) -> None:
        """The first run has ended."""
        self._parameters.note_first_run()

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Run with the state of the first run; what the run changes is rolled back.

        Raises:
            RuntimeError: a parameter that the run reads was exchanged or written to since, or a large tensor among the
                attributes was written to.
        """
        change = _Restored(self._parts)
        with changing(change):
            try:
                with self._parameters.restored(name):
                    change.begin(name)
                    yield
            finally:
                change.end()


class _Restored:
    """Modules with the state of a first run."""

    __slots__ = ("_found", "_own", "_parts", "_streams")

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._found = [Bindings(part.module) for part in parts]
        self._own: list[Bindings] = []
        self._streams: list[list[tuple[torch.Generator, torch.Tensor]]] = []

    def begin(self, name: str) -> None:
        for part in self._parts:
            part.bind(name)

    def end(self) -> None:
        for part, bindings in zip(self._parts, self._found, strict=True):
            part.rewind_generators()
            bindings.bind()

    def put_aside(self) -> None:
        self._own = [Bindings(part.module) for part in self._parts]
        self._streams = [part.streams_now() for part in self._parts]
        self.end()

    def take_up(self) -> None:
        self._found = [Bindings(part.module) for part in self._parts]
        for part, bindings, streams in zip(self._parts, self._own, self._streams, strict=True):
            bindings.bind()
            part.go_on_with(streams)


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
                found = value.for_recompute(now, f"{name} ({key})")
                if found is not _SAME:
                    bound[key] = found
                elif value.stream is not None and isinstance(now, torch.Generator):
                    self._generators.append((now, now.get_state()))
                    now.set_state(value.stream)

    def streams_now(self) -> list[tuple[torch.Generator, torch.Tensor]]:
        """The generators that the recomputation has set, as they are."""
        return [(generator, generator.get_state()) for generator, _ in self._generators]

    def go_on_with(self, streams: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        """Set them so again, for the rest of the recomputation."""
        for generator, state in streams:
            self._generators.append((generator, generator.get_state()))
            generator.set_state(state)

    def rewind_generators(self) -> None:
        """Have generators go on as if there had been no recomputation."""
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
            if value.numel() * value.element_size() <= SMALL_BYTES:
                self._content = value.detach().clone()

    def for_recompute(self, now: Any, name: str) -> Any:
        """What to bind the name to in a recomputation; `_SAME` leaves it. `now` is what it is bound to."""
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


class Bindings:
    """What a module's names are bound to when a recomputation begins."""

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
    """Whether remembering what is in a container keeps no graph alive, and is cheap. If not, a recomputation gets a
    copy of what is in it then."""
    if len(container) > MAX_ITEMS or depth == 0:
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
