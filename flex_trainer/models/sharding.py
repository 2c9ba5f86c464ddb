"""Models whose weights are spread over ranks by FSDP2: which weights are whole when, and what that takes.

A *unit* is a module that `fully_shard` was called on. Its weights are gathered before its forward and given up after
it, gathered again before its backward, and given up after that. So in backward, an operator can be run again while its
own unit or one inside of it is in backward, and at no other time: gathering it then would be a collective that other
ranks do not take part in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from flex_trainer.activations.identity import local_part
from flex_trainer.compat import fsdp_groups, fsdp_policy, place_of_fsdp_parameter
from flex_trainer.errors import UserError
from flex_trainer.experts.dispatch import dispatcher_of
from flex_trainer.models.discovery import ModelMap, Operator


def refuse_unmanaged(model: nn.Module) -> None:
    """Refuse a model that is sharded in a way that is not managed: all but FSDP2 and expert parallelism.

    Raises:
        ValueError: the first module wrapped by FSDP1, or parameter sharded in another way (tensor parallelism).
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UserError(
                f"{type(model).__name__} is sharded by FSDP1 (module {name!r} is wrapped by FullyShardedDataParallel), "
                "which FlexTrainer cannot manage. Write fsdp_version: 2 in the accelerate configuration, or load the "
                "model with distributed_config=DistributedConfig(fsdp_size=...)."
            )
    in_units = sharded_parameters(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and (name not in in_units or _axis_size(parameter, "tp") > 1):
            raise UserError(
                f"{type(model).__name__} is sharded over ranks in a way that FlexTrainer cannot manage in this version "
                f"(parameter {name!r} is a DTensor on the mesh {tuple(parameter.device_mesh.shape)} of "
                f"{parameter.device_mesh.mesh_dim_names}): it takes FSDP2 and expert parallelism. Use tp_size=1, or "
                "transformers' Trainer."
            )


def original_class(module: nn.Module | FSDPModule) -> type:
    """A module's own class: FSDP2 gives its units another one, with a name of its own."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def units_of(model: nn.Module) -> list[FSDPModule]:
    """The units of FSDP2 in a model, outermost first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """After a forward without a backward some units hold whole weights in the place of their shards: give them up."""
    for unit in units_of(model):
        unit.reshard()


def sharded_parameters(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """By the names of the parameters that FSDP2 shards: its group and its own record of each."""
    # Not by identity: loading weights exchanges parameters, which FSDP2 looks up anew when the first forward begins.
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for unit in units_of(model):
        for group in fsdp_groups(unit):
            for parameter in group.fsdp_params:
                module, name = place_of_fsdp_parameter(parameter)
                found[f"{names[module]}.{name}".removeprefix(".")] = group, parameter
    return found


def computing_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """By the names of the parameters that FSDP2 shards: the dtype in which they are gathered and computed with."""
    parameters = dict(model.named_parameters())
    return {
        name: _computing_dtype(group, parameters[name])
        for name, (group, _) in sharded_parameters(model).items()
        if name in parameters
    }


def input_dtype(unit: FSDPModule) -> torch.dtype | None:
    """What FSDP2 casts the floating-point inputs of a unit to; None: nothing is cast."""
    policy = fsdp_policy(unit)
    return policy.param_dtype if policy.cast_forward_inputs else None


def output_dtype(unit: FSDPModule) -> torch.dtype | None:
    """What FSDP2 casts the floating-point outputs of a unit to; None: nothing is cast."""
    return fsdp_policy(unit).output_dtype


def gathered_shape(parameter: DTensor) -> torch.Size:
    """Shape of a parameter once it is gathered; of experts spread over ranks, this rank's share (along dimension 0)."""
    return torch.Size((parameter.shape[0] // _axis_size(parameter, "ep"), *parameter.shape[1:]))


def whole_bytes(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a parameter once it is gathered, in its own or another dtype: whole over all axes but that of expert
    parallelism."""
    return parameter.numel() * (dtype or parameter.dtype).itemsize // _axis_size(parameter, "ep")


def gradient_dtype(group: Any, parameter: torch.Tensor) -> torch.dtype:
    """In which a gradient is reduced, and waits where it is not reduced yet."""
    reduce_dtype = group.mp_policy.reduce_dtype if parameter.is_floating_point() else None
    return reduce_dtype or _computing_dtype(group, parameter)


def gathered_bytes(model: nn.Module) -> int:
    """Most bytes that FSDP2 needs at one time besides what is sharded: gathered weights of the units that keep theirs,
    of the one that runs and the one that comes next, and the gradients of one of them on their way to their owners.
    """
    lasting_bytes, passing, gradients = 0, [0, 0], [0, 0]
    counted: set[int] = set()  # modules may share a group
    for unit in units_of(model):
        groups = [group for group in fsdp_groups(unit) if id(group) not in counted]
        counted.update(map(id, groups))
        num_bytes = gradient_bytes = 0
        for group in groups:
            for one in group.fsdp_params:
                parameter = getattr(*place_of_fsdp_parameter(one))
                dtype = _computing_dtype(group, parameter)
                num_bytes += whole_bytes(parameter, dtype)
                gradient_bytes += whole_bytes(parameter, dtype) + whole_bytes(
                    parameter, gradient_dtype(group, parameter)
                )
        if unit is not model and _keeps_weights(unit):  # the model's own are gathered before anything is measured
            lasting_bytes += num_bytes
        else:
            passing.append(num_bytes)
            gradients.append(gradient_bytes)
    second, first = sorted(passing)[-2:]
    # Of the largest: weights, gradients, and the buffer that these are sent from.
    return lasting_bytes + first + second + max(gradients)


class Units:
    """The units of a model, as the engine has to know them (`activations.residency.Residency`).

    Args:
        modules: by site name.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        units = {
            f"{name}.": module for name, module in model.named_modules() if name and isinstance(module, FSDPModule)
        }
        self._paths = list(units)
        self._lasting = {path: module for path, module in units.items() if _keeps_weights(module)}
        self._is_kept_whole = False
        self._unit_of: dict[str, str] = {}

    def weights(self, site: str) -> Iterator[torch.Tensor]:
        """Parameters of the module behind a site as they are now; of sharded ones, what this rank computes with."""
        module = self._modules.get(site, self._modules.get(site.rpartition(".")[0]))
        if module is not None:
            yield from map(local_part, module.parameters())

    def is_whole(self, site: str, saver: str) -> bool:
        """Whether the weights of a site are whole while the backward of the operator `saver` runs."""
        unit = self._unit(site)
        return unit in self._lasting or self._unit(saver).startswith(unit)

    def keep_whole(self, is_kept: bool) -> None:
        """Whether units that keep their weights until backward keep them after it too: another micro-batch in flight
        may have to run their operators again. All ranks do this at the same points."""
        if is_kept == self._is_kept_whole:
            return
        self._is_kept_whole = is_kept
        for unit in self._lasting.values():
            unit.set_reshard_after_backward(not is_kept, recurse=False)
            if not is_kept:
                unit.reshard()

    def _unit(self, site: str) -> str:
        """Path of the innermost unit around a site, "" for the model itself."""
        unit = self._unit_of.get(site)
        if unit is None:
            around = (path for path in self._paths if f"{site}.".startswith(path))
            unit = self._unit_of[site] = max(around, key=len, default="")
        return unit


def without_recomputed_collectives(model_map: ModelMap) -> ModelMap:
    """The same operators, where none is recomputable whose recomputation would run a collective: gather a unit inside
    of it, or exchange tokens through an implementation that does not ask the other ranks."""
    return model_map.with_kept(_would_run_collective)


def _would_run_collective(operator: Operator) -> bool:
    module = operator.module
    inside = [part for part in module.modules() if part is not module]
    has_inner_unit = any(isinstance(part, FSDPModule) for part in inside)
    is_spread = bool(getattr(module, "_is_expert_parallel", False)) and dispatcher_of(module) is None
    encloses_spread = any(
        getattr(part, "_is_expert_parallel", False) or dispatcher_of(part) is not None for part in inside
    )
    return has_inner_unit or is_spread or encloses_spread


def _computing_dtype(group: Any, parameter: torch.Tensor) -> torch.dtype:
    # FSDP2's own note of it (`FSDPParam.param_dtype`) is made in the first forward.
    dtype = group.mp_policy.param_dtype if parameter.is_floating_point() else None
    return dtype or parameter.dtype


def _axis_size(parameter: torch.Tensor, axis: str) -> int:
    """Ranks along an axis of the mesh that a parameter is spread over; 1 where there is no such axis."""
    if not isinstance(parameter, DTensor):
        return 1
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.device_mesh.size(names.index(axis)) if axis in names else 1


def _keeps_weights(unit: FSDPModule) -> bool:
    """Whether a unit's weights stay whole from its forward to its backward."""
    return all(group.post_forward_mesh_info is None for group in fsdp_groups(unit))
