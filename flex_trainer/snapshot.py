"""What a micro-batch changes besides gradients, so that it can be put back: random streams, buffers, counters.

Each class captures when it is made and puts back on `restore`, which may be called more than once.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from flex_trainer.module_values import (
    CONTAINERS,
    MAX_ITEMS,
    NOT_STATE,
    SMALL_BYTES,
    declared_names,
    has_only_torch_attributes,
    is_scalar,
)

_MAX_COPIED_ELEMENTS = 1


class RandomStreams:
    """The global random streams of Python, numpy, torch, and one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class ModuleValues:
    """Buffers of modules, training flags, which submodules there are and which parameters are trained, and what else is
    plain in their attributes (a counter, the longest sequence seen, a random generator).

    Modules of torch's own that have only torch's attributes are not searched for plain values.

    Args:
        modules: whose values.
        earlier: an earlier capture of the same modules: what has not changed since is shared with it.
    """

    def __init__(self, modules: Iterable[nn.Module], earlier: ModuleValues | None = None) -> None:
        if earlier is not None and any(not record.has_same_children() for record in earlier._records()):
            earlier = None  # there may be other modules now
        if earlier is None:
            self._base = [_ModuleRecord(module) for module in modules]
            self._changed: dict[int, _ModuleRecord] = {}
            self._copies: dict[int, _BufferCopy] = {}
        else:
            self._base = earlier._base
            self._changed = {}
            for index, record in enumerate(earlier._records()):
                if not record.is_current():
                    self._changed[index] = _ModuleRecord(record.module)
                elif index in earlier._changed:
                    self._changed[index] = record
            self._copies = dict(earlier._copies)
        buffers = [buffer for record in self._records() for buffer in record.buffers.values() if buffer is not None]
        self._copies = {
            id(buffer): _copy_of(buffer, self._copies.get(id(buffer)))
            for buffer in buffers
            if not (buffer.is_inference() or _overlaps_itself(buffer))
        }
        if earlier is not None and all(parameter.requires_grad == is_on for parameter, is_on in earlier._trained):
            self._trained = earlier._trained
        else:
            trained = (parameter for record in self._base for parameter in record.parameters())
            self._trained = [(parameter, parameter.requires_grad) for parameter in trained]

    def _records(self) -> Iterator[_ModuleRecord]:
        return (self._changed.get(index, record) for index, record in enumerate(self._base))

    def restore(self) -> None:
        for record in self._records():
            record.restore()
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        with torch.no_grad():
            for buffer, version, value in self._copies.values():
                if _may_have_changed(buffer, version):
                    buffer.copy_(value)


class _ModuleRecord:
    """What one module holds, but for what is in its buffers."""

    __slots__ = ("_children", "_is_training", "_values", "buffers", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_training = module.training
        self._children = dict(module._modules)
        self.buffers = dict(module._buffers)
        is_plain = has_only_torch_attributes(module)
        self._values = None if is_plain else Bookkeeping(module, NOT_STATE, removes_new=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.module._parameters.values() if parameter is not None)

    def has_same_children(self) -> bool:
        return _same_values(self._children, self.module._modules)

    def is_current(self) -> bool:
        """Whether the module holds the same still."""
        if self._is_training != self.module.training or not _same_values(self.buffers, self.module._buffers):
            return False
        return has_only_torch_attributes(self.module) if self._values is None else self._values.is_current()

    def restore(self) -> None:
        module = self.module
        module.training = self._is_training
        _put_back(module._modules, self._children)
        _put_back(module._buffers, self.buffers)
        if self._values is not None:
            self._values.restore()
        elif not has_only_torch_attributes(module):
            for name in vars(module).keys() - declared_names(module):
                del vars(module)[name]


def _same_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    if not first or not second:
        return not first and not second
    return len(first) == len(second) and all(second.get(name, _MISSING) is value for name, value in first.items())


def _put_back(now: dict[str, Any], then: Mapping[str, Any]) -> None:
    if not _same_values(then, now):
        now.clear()
        now.update(then)


_MISSING = object()
_BufferCopy = tuple[torch.Tensor, int, torch.Tensor]
"""Buffer, version, value."""


def _copy_of(buffer: torch.Tensor, known: _BufferCopy | None) -> _BufferCopy:
    """A copy of a buffer's content, which is the known one where that is the same. On a GPU a comparison would wait."""
    if known is not None and known[0] is buffer:
        if not _may_have_changed(buffer, known[1]):
            return known
        if buffer.device.type == "cpu" and buffer._version == known[1] and torch.equal(buffer, known[2]):
            return known
    return buffer, buffer._version, buffer.detach().clone()


def _may_have_changed(buffer: torch.Tensor, version: int) -> bool:
    """Batch norm, and code that writes through `.data`, move no version: a small buffer may always have changed."""
    return buffer._version != version or buffer.numel() * buffer.element_size() <= SMALL_BYTES


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory, as in an expanded tensor: nothing can be written into it."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


class Bookkeeping:
    """Counters and lists of plain values in the attributes of an object, such as the metrics that a trainer collects in
    its `compute_loss`.

    Numbers, strings, random generators, tensors of a single element without a graph (a sum of losses, say), and
    containers of these. Larger tensors may be anything, and what keeps them costs memory: which one an attribute holds
    is put back if it is still alive, what is in it is not. A container with anything else in it, or with more than
    4,096 items, is left alone. Containers are put back in place: who else has them sees the same.

    Args:
        owner: whose attributes.
        excluded: names that are left alone.
        removes_new: whether attributes that appear later are taken away again.
    """

    def __init__(self, owner: Any, excluded: frozenset[str] = frozenset(), *, removes_new: bool = False) -> None:
        self._owner = owner
        self._excluded = excluded
        self._bound: dict[str, Any] = {}
        self._large: dict[str, weakref.ref[torch.Tensor]] = {}
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._streams: list[tuple[Any, Any]] = []
        self._others: dict[str, int] = {}  # what is left alone: only which object it is, so that it may die
        self._names = {*vars(owner), *excluded} if removes_new else None
        for name, value in vars(owner).items():
            if name in excluded:
                continue
            if is_scalar(value):
                self._bound[name] = value
            elif isinstance(value, torch.Tensor):
                if _is_small_tensor(value):
                    self._bound[name] = value
                    self._tensors.append((value, value._version, value.clone()))
                else:
                    self._large[name] = weakref.ref(value)
            elif isinstance(value, torch.Generator):
                self._bound[name] = value
                self._streams.append((value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                self._bound[name] = value
                self._streams.append((value.setstate, value.getstate()))
            elif type(value) in _CONTAINERS and _is_plain(value, set()):
                self._bound[name] = value
                self._note(value)
            else:
                self._others[name] = id(value)

    def is_current(self) -> bool:
        """Whether all of it is as it was captured. A new number of the same value counts as a change, and so does every
        random generator: what is wanted is a quick answer that is never wrong in the other direction."""
        attributes = vars(self._owner)
        known = self._bound.keys() | self._large.keys() | self._others.keys()
        if self._streams or len(known) != sum(name not in self._excluded for name in attributes):
            return False
        return (
            all(attributes.get(name, _MISSING) is value for name, value in self._bound.items())
            and all(large() is not None and attributes.get(name) is large() for name, large in self._large.items())
            and all(id(attributes.get(name)) == other for name, other in self._others.items())
            and all(tensor._version == version for tensor, version, _ in self._tensors)
            and all(_has_content(container, content) for container, content in self._containers)
        )

    def restore(self) -> None:
        attributes = vars(self._owner)
        if self._names is not None:
            for name in attributes.keys() - self._names:
                del attributes[name]
        attributes.update(self._bound)
        for name, large in self._large.items():
            tensor = large()
            if tensor is not None:
                attributes[name] = tensor
        for put_back, state in self._streams:
            put_back(state)
        for tensor, version, value in self._tensors:
            if tensor._version != version:
                tensor.copy_(value)
        for container, content in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)

    def _note(self, container: Any) -> None:
        if type(container) is tuple:
            items: Iterable[Any] = container
        else:
            is_mapping = isinstance(container, dict)
            items = list(container.values()) if is_mapping else list(container)
            self._containers.append((container, dict(container) if is_mapping else items))
        for item in items:
            if type(item) in _CONTAINERS:
                self._note(item)


_CONTAINERS = CONTAINERS | {tuple}


def _has_content(container: Any, content: Any) -> bool:
    """Whether a container has the very items that were in it."""
    if isinstance(content, dict):
        return _same_values(content, container)
    return len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))


def _is_small_tensor(value: Any) -> bool:
    is_leaf = type(value) is torch.Tensor and value.grad_fn is None and not value.is_inference()
    return is_leaf and value.numel() <= _MAX_COPIED_ELEMENTS


def _is_plain(container: Any, seen: set[int]) -> bool:
    """Whether a container holds plain values only, however deep; one that contains itself does not."""
    if id(container) in seen or len(container) > MAX_ITEMS:
        return False
    seen = {*seen, id(container)}
    items = container.values() if isinstance(container, dict) else container
    return all(
        is_scalar(item) or _is_small_tensor(item) or (type(item) in _CONTAINERS and _is_plain(item, seen))
        for item in items
    )
