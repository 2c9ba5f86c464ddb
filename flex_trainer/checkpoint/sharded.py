"""Model and optimizer that are spread over ranks, to a directory and back: each rank writes and reads its own part.

Every parameter and every moment is in it once, whole, under the parameter's name. Another number of ranks, other mesh
sizes, or one process without shards can read it: each takes the pieces it needs. The format is that of torch's
distributed checkpoint.

Torch's `get_optimizer_state_dict` is not used. To learn what an optimizer will keep, it makes a step with gradients of
zeros for all parameters at once, which takes the memory of all gradients; and it cannot load where some parameter had
no state. Here the checkpoint says what there is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from flex_trainer.checkpoint.groups import SavedGroups
from flex_trainer.checkpoint.placement import as_blocks, give_back
from flex_trainer.errors import UserError
from flex_trainer.models.sharding import reshard

_MODEL = "model/"
_OPTIMIZER = "optimizer/"


def save_sharded(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write parameters, persistent buffers and optimizer state. All ranks must call this.

    Raises:
        CheckpointException: torch's, on every rank, with what failed on which.
        ValueError: an optimizer whose state is neither of one element nor of its parameter's shape.
    """
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in _model_tensors(model).items()}
    tensors |= {f"{_OPTIMIZER}{name}": tensor for name, tensor in optimizer_tensors(model, optimizer).items()}
    with torch.no_grad():
        save({name: as_blocks(tensor) for name, tensor in tensors.items()}, checkpoint_id=directory)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimizer's state, by the name of the parameter and the key.

    Raises:
        ValueError: state that is neither of one element nor of its parameter's shape, or parameters that are not the
            model's.
    """
    names = parameter_names(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is none of "
                    f"this {type(model).__name__}'s, and would not be in its checkpoints. Make it part of the model, "
                    "or set save_only_model=True."
                )
    tensors: dict[str, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (value.numel() == 1 or value.shape == parameter.shape):
                tensors[f"{names[parameter]}/{key}"] = value
                continue
            what = (
                f"in the shape {tuple(value.shape)}, which is not the parameter's"
                if isinstance(value, torch.Tensor)
                else f"as {type(value).__name__} and not as a tensor"
            )
            raise UserError(
                f"{type(optimizer).__name__} keeps {key!r} of parameter {names[parameter]!r} {what}: that cannot be "
                "spread over ranks when it is loaded. Use an optimizer such as adamw_torch, or set "
                "save_only_model=True to save the model without it."
            )
    return tensors


def load_model(directory: Path, model: nn.Module) -> None:
    """Read parameters and persistent buffers into `model`, in place. All ranks must call this.

    Raises:
        ValueError: the checkpoint is of another model, or cannot be read.
    """
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in _model_tensors(model).items()}
    stored = {name for name in _stored(directory) if name.startswith(_MODEL)}
    if stored != tensors.keys():
        missing = sorted(name.removeprefix(_MODEL) for name in tensors.keys() - stored)
        unexpected = sorted(name.removeprefix(_MODEL) for name in stored - tensors.keys())
        raise UserError(
            f"the checkpoint {str(directory.parent)!r} is of another model than this {type(model).__name__}: it lacks "
            f"{len(missing)} of its tensors {missing[:3]} and has {len(unexpected)} others {unexpected[:3]}. Resume "
            "with the model that was trained, or load the weights with from_pretrained and start a new run."
        )
    _read(directory, tensors)


def load_optimizer(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved_groups: SavedGroups
) -> None:
    """Read the optimizer's state, and take its options from `saved_groups`. All ranks must call this.

    Parameters may be in other groups than when they were saved: Trainer makes a group for each device mesh.

    Raises:
        ValueError: the checkpoint is of other parameters, or cannot be read.
    """
    names = parameter_names(model)
    parameters = {name: parameter for parameter, name in names.items()}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    for stored_name, stored in _stored(directory).items():
        name, _, key = stored_name.removeprefix(_OPTIMIZER).rpartition("/")
        if stored_name.startswith(_OPTIMIZER) and name in parameters:
            states[name][key] = _empty(stored, parameters[name])
    _read(directory, {f"{_OPTIMIZER}{name}/{key}": tensor for name, of in states.items() for key, tensor in of.items()})
    state: dict[int, dict[str, torch.Tensor]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        group_names = [names[parameter] for parameter in group["params"]]
        numbers = list(range(number, number + len(group_names)))
        number += len(group_names)
        state.update({n: states[name] for n, name in zip(numbers, group_names, strict=True) if states[name]})
        groups.append({**group, **saved_groups.options(group_names), "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def gather_whole(model: Any, is_needed: bool) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes of a model: its whole weights, in host memory, on the ranks that need them; of one
    with adapters what is trained. All ranks must call this."""
    if not hasattr(model, "peft_config"):
        config = model.config.distributed_config
        return model.gather_sharded_state_dict_for_save(model, model.state_dict(), config, save_on_this_rank=is_needed)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
        for name, tensor in _model_tensors(model).items()
    }


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Each parameter's name, as an optimizer sees the parameters: in shards, also after an evaluation."""
    reshard(model)
    return {parameter: name for name, parameter in model.named_parameters()}


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, shared ones once. Of a model with adapters only what is trained: the
    rest is as it was loaded."""
    reshard(model)
    has_adapters = hasattr(model, "peft_config")
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and (tensor.requires_grad or not has_adapters):
            tensors.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in tensors.values()}


def _stored(directory: Path) -> dict[str, TensorStorageMetadata]:
    """What there is in a directory, by name."""
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except (OSError, EOFError) as error:
        raise _unreadable(directory, [error]) from error
    return {name: of for name, of in metadata.state_dict_metadata.items() if isinstance(of, TensorStorageMetadata)}


def _empty(stored: TensorStorageMetadata, parameter: torch.Tensor) -> torch.Tensor:
    """A place for a stored tensor: spread like the parameter that it belongs to, or a number of its own."""
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(stored.size, dtype=dtype)


def _read(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read the named tensors in place."""
    if not tensors:
        return
    with torch.no_grad(), warnings.catch_warnings():
        # One process is as good as any: it may say so without a warning.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        blocks = {name: as_blocks(tensor) for name, tensor in tensors.items()}
        try:
            load(blocks, checkpoint_id=directory)
        except CheckpointException as error:
            raise _unreadable(directory, (failure for failure, _ in error.failures.values())) from error
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                give_back(blocks[name], tensor)


def _unreadable(directory: Path, failures: Iterable[BaseException]) -> UserError:
    reasons = "; ".join(sorted({f"{type(failure).__name__}: {failure}" for failure in failures}))
    return UserError(
        f"the checkpoint {str(directory.parent)!r} cannot be read ({reasons}); resume from an earlier one with "
        "resume_from_checkpoint=PATH"
    )
