"""A copy of a model whose parameters and buffers have shapes and no data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from flex_trainer.models.checkpointing import copy_checkpointing
from flex_trainer.models.effects import is_of_library
from flex_trainer.models.sharding import computing_dtypes, gathered_shape
from flex_trainer.symbolic.sharded import without_sharding
from flex_trainer.undo import take_off_copy

_LARGE_BYTES = 65536


def symbolic_twin(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Copy `model` (on any device, also meta) with fake tensors of `mode` on `device` in place of its own.

    Nothing of the copy reaches back: what its forward changes (counters, caches, attributes) is changed in the copy.
    The hooks that a user put on modules are left out of it, since they may write somewhere else; those of libraries
    stay (PEFT makes embeddings require gradients that way, transformers collects router logits).

    Of a sharded model, the copy is what one rank computes with: weights gathered, in the dtype that they are gathered
    in, its own experts, tokens of all ranks spread evenly over them (experts/fake.py).

    Raises:
        NotSymbolic: experts that get their tokens from other ranks in a way that has no fake.
    """
    memo: dict[int, Any] = {}
    dtypes = computing_dtypes(model)
    with mode:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            memo[id(tensor)] = _fake(tensor, device, dtypes.get(name))
    for module in model.modules():
        for hook in _foreign_hooks(module):
            memo[id(hook)] = _FOREIGN  # not copied: it may hold anything
    with _PlainTensors(mode), without_sharding(model, memo):
        twin = copy.deepcopy(model, memo)
    for module in model.modules():
        take_off_copy(module, memo[id(module)])
    copy_checkpointing(model, memo)  # as it is now: on in the model, off while it is managed
    for module in twin.modules():
        for hooks in _hook_tables(module):
            for number in [number for number, hook in hooks.items() if hook is _FOREIGN]:
                del hooks[number]
    return twin


class _Foreign:
    """In a copied table: a hook of other code."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Foreign:
        return self


_FOREIGN = _Foreign()


def _hook_tables(module: nn.Module) -> tuple[MutableMapping[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _foreign_hooks(module: nn.Module) -> Iterator[Any]:
    for hooks in _hook_tables(module):
        yield from (hook for hook in hooks.values() if not is_of_library(hook))


class _PlainTensors(TorchFunctionMode):
    """Large tensors that are attributes and no parameters or buffers are not copied either."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            tensor, memo = args
            if id(tensor) not in memo and tensor.numel() * tensor.element_size() > _LARGE_BYTES:
                with self._mode:
                    memo[id(tensor)] = _fake(tensor, tensor.device)
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _fake(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    if isinstance(tensor, DTensor):
        fake = torch.empty(gathered_shape(tensor), dtype=dtype, device=device)
    else:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
