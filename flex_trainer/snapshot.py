"""What a micro-batch changes besides gradients, so that it can be put back: random streams, buffers, counters.

Each class captures when it is made and puts back on `restore`, which may be called more than once.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn

NOT_STATE = frozenset({*vars(nn.Module()), "forward"})
"""Names in every module that are not what its forward keeps; `forward` is bound where a module is managed."""
_MAX_ITEMS = 4096
_MAX_COPIED_ELEMENTS = 1
_SMALL_BYTES = 64 * 1024


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

    Args:
        modules: whose values.
        earlier: what was captured before: copies of large buffers that have not changed since are shared with it.
    """

    def __init__(self, modules: Iterable[nn.Module], earlier: ModuleValues | None = None) -> None:
        known = {} if earlier is None else earlier._copies
        self._modules = [
            (
                module,
                module.training,
                dict(module._modules),
                dict(module._buffers),
                Bookkeeping(module, NOT_STATE, removes_new=True),
            )
            for module in modules
        ]
        self._trained = [
            (parameter, parameter.requires_grad)
            for module, *_ in self._modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # buffer, version, value
        for _, _, _, buffers, _ in self._modules:
            for buffer in buffers.values():
                if buffer is None or buffer.is_inference() or _overlaps_itself(buffer):
                    continue
                found = known.get(id(buffer))
                if found is not None and found[0] is buffer and not _may_have_changed(buffer, found[1]):
                    self._copies[id(buffer)] = found
                else:
                    self._copies[id(buffer)] = buffer, buffer._version, buffer.detach().clone()

    def restore(self) -> None:
        for module, is_training, children, buffers, values in self._modules:
            module.training = is_training
            module._modules.clear()
            module._modules.update(children)
            module._buffers.clear()
            module._buffers.update(buffers)
            values.restore()
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        with torch.no_grad():
            for buffer, version, value in self._copies.values():
                if _may_have_changed(buffer, version):
                    buffer.copy_(value)


def _may_have_changed(buffer: torch.Tensor, version: int) -> bool:
    """Batch norm, and people who write through `.data`, move no version: a small buffer may always have changed."""
    return buffer._version != version or buffer.numel() * buffer.element_size() <= _SMALL_BYTES


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
        self._bound: dict[str, Any] = {}
        self._large: dict[str, weakref.ref[torch.Tensor]] = {}
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._streams: list[tuple[Any, Any]] = []
        self._names = {*vars(owner), *excluded} if removes_new else None
        for name, value in vars(owner).items():
            if name in excluded:
                continue
            if _is_scalar(value):
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


_CONTAINERS = (dict, defaultdict, OrderedDict, Counter, list, deque, set, tuple)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, Number | str)


def _is_small_tensor(value: Any) -> bool:
    is_leaf = type(value) is torch.Tensor and value.grad_fn is None and not value.is_inference()
    return is_leaf and value.numel() <= _MAX_COPIED_ELEMENTS


def _is_plain(container: Any, seen: set[int]) -> bool:
    """Whether a container holds plain values only, however deep; one that contains itself does not."""
    if id(container) in seen or len(container) > _MAX_ITEMS:
        return False
    seen = {*seen, id(container)}
    items = container.values() if isinstance(container, dict) else container
    return all(
        _is_scalar(item) or _is_small_tensor(item) or (type(item) in _CONTAINERS and _is_plain(item, seen))
        for item in items
    )
