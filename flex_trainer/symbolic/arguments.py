"""A forward's arguments with tensors without data in place of the real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

_ATOMS = (bool, int, float, str, Enum, torch.dtype, torch.device, type(None))


def with_fakes(value: Any, fake: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested arguments whose tensors are `fake(tensor)`: in lists, tuples, mappings of any class (a
    BatchEncoding, a ModelOutput) and dataclasses.

    Raises:
        TypeError: an object that the forward might change, and that is not known how to copy. A cache, for one, would
            be given fake tensors to keep.
    """
    if isinstance(value, torch.Tensor):
        return fake(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, tuple):
        items = [with_fakes(item, fake) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [with_fakes(item, fake) for item in value]
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for name, item in value.items():
            copied[name] = with_fakes(item, fake)
        return copied
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(copied, field.name, with_fakes(getattr(value, field.name), fake))
        return copied
    raise TypeError(f"an argument is a {type(value).__name__}, which the forward might change")
