"""Weights that are made before an operator runs and read inside of it, though they are no arguments of it.

    torch.nn.utils.parametrize.cached()    made at the first read, and handed out again until the context ends
    torch.nn.utils.weight_norm and others  made by a hook before forward, and bound to an attribute of the module

A recomputation must find the same weights: not make them where the first run found them made, nor find them made where
the first run made them. So they are further inputs of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from flex_trainer.activations.aside import changing
from flex_trainer.compat import made_parametrizations, parametrizations_are_made


class MadeWeights:
    """The weights in a module that were made before its first run.

    Args:
        parts: all modules in it.
    """

    __slots__ = ("_attributes", "_keys", "_num_caching", "tensors")

    def __init__(self, parts: list[nn.Module]) -> None:
        self._num_caching, made = made_parametrizations()
        ids = {id(part) for part in parts} if made else set()
        of_parts = {key: tensor for key, tensor in made.items() if key[0] in ids and tensor is not None}
        self._keys = list(of_parts)
        self._attributes = [
            (part, name, value)
            for part in parts
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor) and value.grad_fn is not None
        ]
        self.tensors: list[torch.Tensor] = [*of_parts.values(), *(value for *_, value in self._attributes)]

    def note_first_run(self) -> list[bool]:
        """The first run has ended: which of `tensors` it has read, not made anew. Forgets all of them."""
        is_read = [vars(part).get(name) is value for part, name, value in self._attributes]
        kept = [True] * len(self._keys) + is_read
        self._attributes = [
            (part, name, None) for (part, name, _), read in zip(self._attributes, is_read, strict=True) if read
        ]
        self.tensors = []
        return kept

    @contextmanager
    def found(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have a recomputation find `tensors`, the values of those that were read; module_state.py binds names back."""
        made = dict(zip(self._keys, tensors, strict=False))
        for (part, name, _), tensor in zip(self._attributes, tensors[len(self._keys) :], strict=True):
            vars(part)[name] = tensor
        is_changed = bool(self._num_caching or made)
        with changing(None) if is_changed else nullcontext(), parametrizations_are_made(self._num_caching, made):
            yield
