"""Copies of sharded modules: FSDP2 refuses to be copied, and the copy must not talk to other ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only
from transformers.distributed.utils import TransformersDeviceMesh

from flex_trainer.experts.dispatch import FlexEP, dispatcher_of
from flex_trainer.experts.fake import FakeEP
from flex_trainer.models.sharding import input_dtype, original_class, output_dtype
from flex_trainer.symbolic.counter import NotSymbolic

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


@contextmanager
def without_sharding(model: nn.Module, memo: dict[int, Any]) -> Iterator[None]:
    """For a deep copy of `model` with `memo`: units of FSDP2 become modules of their own class, without its hooks but
    with the casts that these do, and dispatches between ranks become fakes. What is around a unit and hands on to it
    all that it does not have itself, the refusal to be copied too, becomes a module of its own class as well.

    Raises:
        NotSymbolic: experts that get their tokens from other ranks in a way that has no fake.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule) or _hands_through(module)]
    dispatchers = {module: one for module in model.modules() if isinstance(one := dispatcher_of(module), FlexEP)}
    for module in model.modules():
        if getattr(module, "_is_expert_parallel", False) and module not in dispatchers:
            raise NotSymbolic("experts on other ranks are reached by another implementation than 'flex'")
    for dispatcher in dispatchers.values():
        memo[id(dispatcher)] = None
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, (DeviceMesh, TransformersDeviceMesh)):
                memo[id(value)] = value
    for unit in units:
        memo[id(unit)] = object.__new__(original_class(unit))
    yield
    for unit in units:
        vars(memo[id(unit)]).update(copy.deepcopy(_state(unit), memo))
        if isinstance(unit, FSDPModule):
            _cast_as(unit, memo[id(unit)])
    for module, dispatcher in dispatchers.items():
        FakeEP(memo[id(module)], dispatcher.num_ranks, dispatcher.num_local_experts)


def _cast_as(unit: FSDPModule, copied: nn.Module) -> None:
    """Cast what goes into and comes out of the copy of a unit as FSDP2's mixed precision does, first and last."""
    into, out = input_dtype(unit), output_dtype(unit)
    if into is not None:
        copied.register_forward_pre_hook(
            lambda module, args, kwargs: (_cast(args, into), _cast(kwargs, into)), with_kwargs=True, prepend=True
        )
    if out is not None:
        copied.register_forward_hook(lambda module, args, output: _cast(output, out))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )


def _hands_through(module: nn.Module) -> bool:
    """Whether copying the module would be left to a module inside, as PEFT's and torch's wrappers do."""
    return not hasattr(type(module), "__deepcopy__") and hasattr(module, "__deepcopy__")


def _state(unit: nn.Module) -> dict[str, Any]:
    """What a unit would hold if it were none."""
    state = {name: value for name, value in vars(unit).items() if name not in (STATE_KEY, REGISTRY_KEY)}
    for name in _HOOK_TABLES:
        state[name] = _not_of_fsdp(state[name])
    return state


def _not_of_fsdp(hooks: MutableMapping[int, Any]) -> MutableMapping[int, Any]:
    kept = copy.copy(hooks)
    for number, hook in hooks.items():
        if (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp"):
            del kept[number]
    return kept
