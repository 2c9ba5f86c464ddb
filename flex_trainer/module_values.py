"""What counts as plain state of a module, for all who put it back: a rolled-back step (snapshot.py) and a recomputation
(activations/module_state.py). How they put it back differs: one writes into the objects, the other binds copies."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict, deque
from numbers import Number
from typing import Any

from torch import nn

NOT_STATE = frozenset({*vars(nn.Module()), "forward"})
"""Names in every module that are not what its forward keeps; `forward` is bound where a module is managed."""
CONTAINERS = frozenset({list, set, deque, dict, defaultdict, OrderedDict, Counter})
"""Containers whose content is looked at and copied. Tuples cannot change; subclasses may do anything."""
MAX_ITEMS = 4096
"""The content of longer containers is not remembered."""
SMALL_BYTES = 64 * 1024
"""Larger tensors are not copied without need."""

_FLAGS = frozenset({"_is_hf_initialized"})
"""Marks that transformers leaves on modules of torch."""


def is_scalar(value: Any) -> bool:
    """Whether a value cannot change and holds nothing."""
    return value is None or isinstance(value, Number | str)


def has_only_torch_attributes(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, and has the attributes that its class declares and no others: sizes and
    settings, which its forward does not change."""
    declared = _declared(type(module))
    return declared is not None and vars(module).keys() <= declared


def declared_names(module: nn.Module) -> frozenset[str]:
    """Attributes that one of torch's own modules has by its class."""
    return _declared(type(module)) or frozenset()


@functools.cache
def _declared(kind: type[nn.Module]) -> frozenset[str] | None:
    if not kind.__module__.startswith("torch.nn."):
        return None
    names = {*NOT_STATE, *_FLAGS}
    for base in kind.__mro__:
        names.update(vars(base).get("__annotations__", ()), vars(base).get("__constants__", ()))
    return frozenset(names)
