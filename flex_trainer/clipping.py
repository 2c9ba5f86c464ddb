"""Gradient clipping where parameters are spread over several device meshes: experts over one, all else over another.

torch's own function takes the norm of all gradients at once, which DTensors of different meshes do not allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`.

    All ranks call it. The result is that of `torch.nn.utils.clip_grad_norm_` on the same model in one process.

    Args:
        parameters: plain ones and DTensors, on any number of meshes; those without a gradient are passed over.
        max_norm: infinity: only measure.
        norm_type: the p of the p-norm; infinity for the largest element.

    Returns:
        The norm before clipping, the same on every rank.
    """
    with_gradients = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    by_mesh: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in with_gradients:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    if not by_mesh:
        return torch.tensor(0.0)
    norms = [_total_norm(group, norm_type) for group in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm != float("inf"):
        for group in by_mesh.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def _total_norm(parameters: list[nn.Parameter], norm_type: float) -> torch.Tensor:
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
