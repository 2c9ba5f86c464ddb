"""What the sizes of a forward's activations depend on, read off its inputs.

Inputs are found wherever they are: bare, by position, in dictionaries (a BatchEncoding, a ModelOutput), lists, named
tuples, dataclasses and plain objects, however nested. A path such as `query.input_ids` names each.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from flex_trainer.cost.shape import BatchShape
from flex_trainer.models.run_state import RunState

_MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "input_values", "input_features", "pixel_values")
_SIZE_NUMBERS = frozenset({"logits_to_keep", "num_logits_to_keep"})
"""Numbers among the arguments that say how large something is. Others (`num_items_in_batch`, say) change every time and
say nothing of sizes."""
_NOT_DATA = (type, nn.Module, FunctionType, MethodType, BuiltinFunctionType, torch.Generator)
_FLAGS = (bool, Enum, torch.dtype, torch.device, torch.layout)
_MAX_TEXT = 64
_MAX_DEPTH = 12
_MAX_ITEMS = 4096


class Inputs:
    """Reads the shape of each micro-batch of one model, together with what is trained and how it runs.

    Args:
        model: its modules and parameters are looked up once, here.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = _positional_names(model)
        self._state = RunState(model)

    def shape_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchShape:
        """The shape of the micro-batch that the model's forward is about to run on these arguments."""
        return shape_of(args, kwargs, self._names, self._state.name())


def shape_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = (), state: str = ""
) -> BatchShape:
    """The shape of a micro-batch: batch size, sequence length, and what else may change which operators run.

    A padding mask that masks nothing is skipped by transformers' mask functions, and then attention runs another way:
    so whether there is padding is part of the kind.

    Args:
        names: of the arguments given by position.
        state: of the model; part of the kind.
    """
    found = _Found()
    for number, arg in enumerate(args):
        found.collect(names[number] if number < len(names) else f"arg{number}", arg)
    for name, value in kwargs.items():
        found.collect(name, value)
    main = found.main()
    batch_size, sequence_length = (1, 1) if main is None else _rows_and_length(found.sizes[main])
    facts = [
        f"{path}:{len(found.sizes[path])}:{found.dtypes[path]}{found.gradient(path)}" for path in sorted(found.sizes)
    ]
    # Other inputs with sizes of their own (images, frames) make batches of their own kind; those that grow with the
    # batch (positions shared by all rows, masks of length x length) do not, so these sizes are named, not numbered.
    named = {sequence_length: "S", batch_size: "B"}
    for path, sizes in sorted(found.sizes.items()):
        if _has_own_sizes(sizes, batch_size, sequence_length, path == main):
            facts.append(f"{path}=({','.join(named.get(size, str(size)) for size in sizes)})")
    facts += [f"{path}={value}" for path, value in sorted(found.flags.items())]
    device = found.device()
    if torch.is_autocast_enabled(device):
        facts.append(f"autocast={torch.get_autocast_dtype(device)}")
    if state:
        facts.append(f"state={state}")
    is_told = found.is_told and main is not None
    return BatchShape(batch_size, sequence_length, " ".join(facts), found.has_padding(), is_told)


class _Found:
    """Tensors and flags among a forward's arguments, by path."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, ...]] = {}
        """Of tensors, and of arrays and lists of numbers of which the forward may make tensors."""
        self.dtypes: dict[str, str] = {}
        self.flags: dict[str, str] = {}
        self.is_told = True
        """Whether all arguments could be read."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_items = 0
        self._seen: set[int] = set()

    def collect(self, path: str, value: Any, depth: int = 0) -> None:
        self._num_items += 1
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif value is None or isinstance(value, _NOT_DATA):
            pass
        elif isinstance(value, _FLAGS) or (isinstance(value, str) and len(value) <= _MAX_TEXT):
            self.flags[path] = str(value)
        elif isinstance(value, Number):
            if path.rpartition(".")[2] in _SIZE_NUMBERS:
                self.flags[path] = str(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            self._add(path, value.shape, value.dtype)
        elif depth < _MAX_DEPTH and self._num_items < _MAX_ITEMS and id(value) not in self._seen:
            self._seen.add(id(value))
            self._container(path, value, depth)
            self._seen.discard(id(value))
        else:
            self.is_told = False

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        self._tensors[path] = tensor
        if tensor.is_nested and tensor.layout == torch.jagged:
            self._add(path, (1, *tensor.values().shape), tensor.dtype)  # rows one after the other
        elif tensor.layout == torch.strided and not tensor.is_nested:
            self._add(path, tensor.shape, tensor.dtype)
        else:
            self._add(path, tensor.shape if not tensor.is_nested else (), tensor.dtype)
            self.is_told = False  # how much a sparse tensor holds is not in its shape

    def _add(self, path: str, sizes: Sequence[int], dtype: object) -> None:
        self.sizes[path] = tuple(int(size) for size in sizes)
        self.dtypes[path] = str(dtype)

    def _container(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple, deque)):
            if value and isinstance(value[0], str):
                self.is_told = False  # texts: how many tokens they become is not known before forward
            elif value and (sizes := _sizes_of_numbers(value)):
                self._add(path, sizes, "numbers")
                return
        parts = _parts(value)
        if parts is None:
            self.is_told = False
            return
        for name, item in parts:
            self.collect(f"{path}.{name}", item, depth + 1)

    def main(self) -> str | None:
        """The path of the input that says how many tokens there are."""
        by_name: dict[str, str] = {}
        for path in self.sizes:
            by_name.setdefault(path.rpartition(".")[2], path)
        named = [by_name[name] for name in _MAIN_INPUTS if name in by_name and self.sizes[by_name[name]]]
        if named:
            return named[0]
        with_rows = [path for path, sizes in self.sizes.items() if len(sizes) >= 2]
        longest = max((path for path, sizes in self.sizes.items() if sizes), key=lambda p: self.sizes[p], default=None)
        return with_rows[0] if with_rows else longest

    def gradient(self, path: str) -> str:
        tensor = self._tensors.get(path)
        return ":gradient" if tensor is not None and tensor.requires_grad else ""

    def device(self) -> str:
        return next((tensor.device.type for tensor in self._tensors.values()), "cpu")

    def has_padding(self) -> bool:
        """Whether a mask masks anything; without masks, whether sequences are packed: positions start anew, and a mask
        is made that keeps them apart."""
        masks = self._named("attention_mask")
        if masks:
            return any(mask.dim() == 2 and not bool(mask.all()) for mask in masks)
        positions = self._named("position_ids")
        return any(one.dim() == 2 and bool((one.diff(dim=1) != 1).any()) for one in positions)

    def _named(self, name: str) -> list[torch.Tensor]:
        found = [tensor for path, tensor in self._tensors.items() if path.rpartition(".")[2] == name]
        return [tensor for tensor in found if tensor.layout == torch.strided]


def _parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """What a container or an object holds, by name; None: what it holds cannot be seen."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, (list, tuple, deque)):
        return zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    if is_dataclass(value):
        return ((field.name, getattr(value, field.name, None)) for field in fields(value))
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__"]
    if hasattr(value, "__dict__") or slots:
        here = ((name, getattr(value, name)) for name in slots if hasattr(value, name))
        return chain(here, vars(value).items()) if hasattr(value, "__dict__") else here
    return None


def _sizes_of_numbers(value: Sequence[Any]) -> tuple[int, ...]:
    """Sizes of a list of numbers (N,), or of lists of numbers (N, longest); () for anything else."""
    if all(isinstance(item, Number) for item in value):
        return (len(value),)
    if all(isinstance(item, (list, tuple)) and isinstance(next(iter(item), None), Number) for item in value):
        return len(value), max(len(item) for item in value)
    return ()


def _rows_and_length(sizes: tuple[int, ...]) -> tuple[int, int]:
    *rows, length = sizes[:2]
    return rows[0] if rows else 1, length


def _has_own_sizes(sizes: tuple[int, ...], batch_size: int, sequence_length: int, is_main: bool) -> bool:
    """Whether an input's sizes are not told by its number of dimensions. A vector is taken for lengths or counts, one
    for each row or sequence, unless it is longer than there are tokens."""
    if len(sizes) < 2:
        return not is_main and sum(sizes) > batch_size * sequence_length + 1
    return len(sizes) > 2 or sizes != (batch_size, sequence_length)


def _positional_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a model's forward; of the model inside, where a wrapper takes any."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in (model, *inner[:1]):
        kinds = [(name, p.kind) for name, p in inspect.signature(module.forward).parameters.items()]
        names = tuple(name for name, kind in kinds if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if names:
            return names
    return ()
