"""What a micro-batch changes besides gradients, so that it can be put back: random streams, buffers, counters.

Each class captures when it is made and puts back on `restore`, which may be called more than once.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn

_NOT_STATE = frozenset({"training"})
_MOST_ITEMS = 4096


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


class Buffers:
    """Buffers of modules, and the plain attributes beside them (a rotary embedding notes the longest sequence seen)."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._bindings = [(module, dict(module._buffers)) for module in modules]
        self._scalars = [(module, _scalars(module)) for module, _ in self._bindings]
        self._values = [
            (buffer, buffer._version, buffer.detach().clone())
            for _, buffers in self._bindings
            for buffer in buffers.values()
            if buffer is not None and not buffer.is_inference()
        ]

    def restore(self) -> None:
        for module, buffers in self._bindings:
            module._buffers.clear()
            module._buffers.update(buffers)
        for module, scalars in self._scalars:
            for name in _scalars(module).keys() - scalars.keys():
                delattr(module, name)
            vars(module).update(scalars)
        with torch.no_grad():
            for buffer, version, value in self._values:
                if buffer._version != version:
                    buffer.copy_(value)


def _scalars(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if (value is None or type(value) in (int, float, bool, str)) and name not in _NOT_STATE
    }


class Bookkeeping:
    """Counters and lists of plain values in the attributes of an object, such as the metrics that a trainer collects in
    its `compute_loss`.

    Numbers, strings, tensors without a graph, and containers of these. A container with anything else in it, or with
    more than 4,096 items, is left alone. Containers are put back in place: who else has them sees the same.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._scalars: dict[str, Any] = {}
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        for name, value in vars(owner).items():
            if _is_scalar(value):
                self._scalars[name] = value
            elif _is_small_tensor(value):
                self._scalars[name] = value
                self._tensors.append((value, value._version, value.clone()))
            elif type(value) in _CONTAINERS and _is_plain(value, set()):
                self._scalars[name] = value
                self._note(value)

    def restore(self) -> None:
        vars(self._owner).update(self._scalars)
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
    return type(value) is torch.Tensor and value.numel() <= 1 and value.grad_fn is None and not value.is_inference()


def _is_plain(container: Any, seen: set[int]) -> bool:
    """Whether a container holds plain values only, however deep; one that contains itself does not."""
    if id(container) in seen or len(container) > _MOST_ITEMS:
        return False
    seen = {*seen, id(container)}
    items = container.values() if isinstance(container, dict) else container
    return all(
        _is_scalar(item)
        or (isinstance(item, torch.Tensor) and item.grad_fn is None)
        or (type(item) in _CONTAINERS and _is_plain(item, seen))
        for item in items
    )
