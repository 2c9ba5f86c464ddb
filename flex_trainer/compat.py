"""All that depends on a version of torch, transformers or accelerate. Each entry says when it can go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# What FSDP2 does with a unit now. Private in torch 2.13; goes as `fsdp_pass_state` does.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# How transformers turns tensors of files into those of a model. Private in transformers 5.24; goes when it can read and
# convert one tensor of a checkpoint.
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)

# Puts the local parts in place of a module's sharded parameters for as long as a context lasts. Private in transformers
# 5.24; goes when torch modules take local parameters by themselves.
from transformers.distributed.parallel_utils import _use_local_dtensor_params as local_parameters

# The grouped product with bias and layout handled. Private in transformers 5.24; goes when it is exported.
from transformers.integrations.moe import _grouped_linear as grouped_linear

# What transformers makes of every decoder layer. Public in the module it stands in, not at the top; goes when it is.
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.utils import import_utils

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DecoderLayer",
    "active_torch_modes",
    "allocator_settings",
    "as_if_real",
    "convert_into",
    "current_backward",
    "FsdpPassState",
    "fsdp_groups",
    "fsdp_pass_state",
    "fsdp_policy",
    "grouped_linear",
    "hooks_of_all_modules",
    "is_in_backward",
    "keeps_graph",
    "local_parameters",
    "made_parametrizations",
    "names_in_model",
    "parametrizations_are_made",
    "place_of_fsdp_parameter",
    "prepared_models",
    "prepared_optimizers",
    "release_pinned_cache",
    "top_pack_hook",
    "weight_conversions",
    "when_backward_ends",
]


@contextmanager
def as_if_real() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones: it then skips masks that mask nothing, as in a real run.

    transformers 5.24 takes other paths for fake tensors, which it meets in torch.export only; goes when that can be
    asked for.
    """
    original = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


def is_in_backward() -> bool:
    """Whether this thread runs a backward: a forward that runs now is a recomputation."""
    return current_backward() >= 0


def release_pinned_cache() -> None:
    """Give pinned host memory that torch caches unused back to the system.

    torch.cuda.empty_cache leaves the host's side alone; goes when torch 2.13's private function is public.
    """
    torch._C._host_emptyCache()


def current_backward() -> int:
    """The number of the backward that runs on this thread; -1 outside of one.

    torch 2.13 has it for its own checkpointing only; goes when it is public.
    """
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward that runs on this thread keeps what was saved for it (`retain_graph=True`).

    Private in torch 2.13; goes when it is public.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs on this thread has ended; never, where it ends in an error.

    FSDP2 and DDP use the same call, which torch 2.13 has no public name for.

    Raises:
        RuntimeError: outside of a backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def weight_conversions(model: PreTrainedModel) -> list[Any]:
    """The rules by which names and shapes in files become those of the model."""
    return get_model_conversion_mapping(model)


def names_in_model(names: Iterable[str], model: PreTrainedModel, conversions: list[Any]) -> dict[str, str]:
    """By the names of tensors in files: the (first) tensor of the model that is made from each. Those that the model
    has no place for are left out."""
    there = model.state_dict()
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    found = {}
    for name in names:
        target = rename_source_key(name, renamings, converters, model.base_model_prefix, there)[0]
        if target not in there and name in there:
            target = rename_source_key(name, [], [], model.base_model_prefix, there)[0]
        if target in there:
            found[name] = target
    return found


def convert_into(model: PreTrainedModel, tensors: Mapping[str, Any], conversions: list[Any]) -> None:
    """Put tensors of files, or slices that are not read yet, into a model on one process, as from_pretrained does: in
    the dtypes that the model has. Those that do not fit its shapes are left out.

    Raises:
        ValueError: they cannot be converted.
    """
    settings = LoadStateDictConfig(device_map={"": "cpu"}, dtype=model.dtype, weight_mapping=conversions)
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), settings)
    if info.conversion_errors:
        raise ValueError("; ".join(str(error) for error in info.conversion_errors.values()))


def prepared_models(accelerator: Accelerator) -> list[nn.Module]:
    """The models that an accelerator has prepared. Private in accelerate 1.15; goes when they can be listed."""
    return accelerator._models


def prepared_optimizers(accelerator: Accelerator) -> list[Any]:
    """The optimizers that an accelerator has prepared. Private in accelerate 1.15; goes when they can be listed."""
    return accelerator._optimizers


def fsdp_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of the parameters that belong to a unit and to none inside of it, each with its `fsdp_params`.

    Private in torch 2.13; goes when it can be asked which parameters are whose.
    """
    return unit._get_fsdp_state()._fsdp_param_groups


def fsdp_policy(unit: FSDPModule) -> MixedPrecisionPolicy:
    """What a unit was told of dtypes. Private in torch 2.13; goes when it can be asked for."""
    return unit._get_fsdp_state()._mp_policy


def place_of_fsdp_parameter(parameter: Any) -> tuple[nn.Module, str]:
    """The module of one of a group's `fsdp_params`, and its name there. Private in torch 2.13; goes as `fsdp_groups`
    does."""
    return parameter._module_info.module, parameter._module_info.param_name


def fsdp_pass_state(model: nn.Module) -> FsdpPassState:
    """What FSDP2 keeps of the forward or backward that is under way in a model, to be exchanged for that of another.

    Private in torch 2.13; goes when two micro-batches may run at a time.
    """
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    return FsdpPassState(list(dict.fromkeys(states)))  # modules that were sharded together share one


class FsdpPassState:
    """See `fsdp_pass_state`.

    Args:
        states: FSDP2's states of all units.
    """

    def __init__(self, states: list[Any]) -> None:
        self._states = states
        self.groups: list[Any] = [group for state in states for group in state._fsdp_param_groups]
        """FSDP2's groups of parameters, each with `unshard`, `wait_for_unshard` and `reshard`."""

    def taken(self) -> Any:
        """The state as it is."""
        context = self._states[0]._state_ctx
        return (
            [state._training_state for state in self._states],
            [set(state._modules_to_run_forward) for state in self._states],
            [(g._training_state, g._post_forward_indices, g.reduce_grads, g.all_reduce_grads) for g in self.groups],
            (context.iter_forward_root, context.post_backward_final_callback_queued, context.is_last_backward),
            self._states[0]._comm_ctx.post_forward_order,
        )

    def waiting(self, gradient_flags: list[tuple[bool, bool]]) -> Any:
        """The state that the backward of the latest forward finds: it is in no unit, and does not end the step."""
        idle = TrainingState.IDLE
        groups = zip(self.groups, gradient_flags, strict=True)
        return (
            [idle] * len(self._states),
            [set() for _ in self._states],
            [(idle, group._post_forward_indices, *flags) for group, flags in groups],
            (None, False, False),
            self._states[0]._comm_ctx.post_forward_order,
        )

    def put(self, taken: Any) -> None:
        """Make it that of `taken`."""
        states, to_run, groups, of_pass, order = taken
        context, communication = self._states[0]._state_ctx, self._states[0]._comm_ctx
        for state, training_state, modules in zip(self._states, states, to_run, strict=True):
            state._training_state = training_state
            state._modules_to_run_forward.clear()
            state._modules_to_run_forward.update(modules)
        for group, values in zip(self.groups, groups, strict=True):
            group._training_state, group._post_forward_indices, group.reduce_grads, group.all_reduce_grads = values
        context.iter_forward_root, context.post_backward_final_callback_queued, context.is_last_backward = of_pass
        communication.post_forward_order = order

    def begin_forward(self) -> None:
        """A forward begins, or has entered its root: it notes an order of its own."""
        for group in self.groups:
            group._post_forward_indices = []
        self._states[0]._comm_ctx.post_forward_order = []

    def gradient_flags(self) -> list[tuple[bool, bool]]:
        """Whether each group's backward reduces gradients over shards, and over replicas."""
        return [(group.reduce_grads, group.all_reduce_grads) for group in self.groups]

    def is_inside(self, taken: Any, number: int) -> bool:
        """Whether the pass of `taken` is inside of group `number`."""
        return taken[2][number][0] in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)

    def gather_under_way(self, group: Any) -> list[Any]:
        """The works to wait for on the host before the gathered weights of a group are there."""
        result = group._all_gather_result
        return [] if result is None or result.all_gather_work is None else [result.all_gather_work]


def allocator_settings() -> str:
    """The settings of the device's allocator as torch parsed them last. Private in torch 2.13; goes when they can be
    read."""
    return torch._C._accelerator_getAllocatorSettings()


def hooks_of_all_modules() -> list[Callable[..., object]]:
    """The forward hooks that torch runs for every module. Private in torch 2.13; goes when they can be listed."""
    return [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]


def active_torch_modes() -> list[object]:
    """The modes that see every torch function or operation on this thread now.

    Private in torch 2.13; goes when they can be listed.
    """
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def top_pack_hook() -> Callable[[torch.Tensor], object] | None:
    """The hook that autograd gives tensors to now when it saves them; None where there is none.

    Private in torch 2.13; goes when it can be asked for.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def made_parametrizations() -> tuple[int, dict[tuple[int, str], torch.Tensor | None]]:
    """How many `parametrize.cached()` are open, and what they hold, by the id of the module and the parameter's name.

    Private in torch 2.13; goes when it can be asked for.
    """
    return parametrize._cache_enabled, parametrize._cache


@contextmanager
def parametrizations_are_made(num_caching: int, made: dict[tuple[int, str], torch.Tensor]) -> Iterator[None]:
    """Have `num_caching` contexts `parametrize.cached()` open that hold `made`, whatever is open outside."""
    earlier = made_parametrizations()
    parametrize._cache_enabled, parametrize._cache = num_caching, dict(made)
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = earlier
