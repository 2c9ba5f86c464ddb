"""Checksums of tensors that are spread over ranks: each rank sums its own part, and the parts add up to the whole.

    checksum = sum over elements of  bits(element) x factor_0(row) x factor_1(column) x ...   modulo 2^64

The factors are odd pseudo-random numbers of an element's place in the whole tensor, so values that have changed places
are found as well as values that have changed. One number per tensor is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

_PIECE_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """Of a whole tensor on this process, or of this rank's part of one that is spread: a signed 64-bit number.

    No rank waits for another here. Takes 64 MiB beside the tensor.
    """
    indices = _local_indices(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.is_complex():
        local, indices = torch.view_as_real(local), [*indices, torch.arange(2, device=local.device)]
    if local.dim() == 0:
        local, indices = local.reshape(1), [torch.zeros(1, dtype=torch.int64, device=local.device)]
    if local.numel() == 0:
        return 0
    factors = [_factors(index.to(local.device), axis) for axis, index in enumerate(indices)]
    num_rows = max(1, _PIECE_ELEMENTS * len(local) // local.numel())
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for rows, of_rows in zip(local.split(num_rows), factors[0].split(num_rows), strict=True):
        bits = rows.contiguous().view(_INTEGERS[rows.element_size()]).to(torch.int64)
        for of_axis in reversed(factors[1:]):
            bits = (bits * of_axis).sum(-1)
        total += (bits * of_rows).sum()
    return int(total)


def differing(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, int]) -> list[str]:
    """Names of the tensors of which some copy is not what it should be. All ranks must call this, with the same tensors
    and their own parts; each checksum may be known on one rank or on several.

    Args:
        tensors: whole or spread over ranks.
        expected: checksums of whole tensors, by name.
    """
    names = list(tensors)
    device = next((_local(tensor).device for tensor in tensors.values()), torch.device("cpu"))
    columns = [
        # Checksum and elements here; checksum expected, and by how many ranks.
        [checksum(tensor), _local(tensor).numel(), expected.get(name, 0), int(name in expected)]
        for name, tensor in tensors.items()
    ]
    if not names:
        return []
    sums = torch.tensor(columns, dtype=torch.int64, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    found = []
    for name, (total, num_elements, known, num_knowing) in zip(names, sums.tolist(), strict=True):
        num_copies = num_elements // max(tensors[name].numel(), 1)
        # Each copy adds up to the whole's checksum, and each rank that knows it has added it once.
        if num_knowing and _modulo(total * num_knowing) != _modulo(known * num_copies):
            found.append(name)
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _modulo(number: int) -> int:
    return number % (1 << 64)


def _local_indices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """By dimension: where in the whole tensor this rank's rows, columns, ... are."""
    if not isinstance(tensor, DTensor):
        return [torch.arange(size, device=tensor.device) for size in tensor.shape]
    return [_spread(torch.arange(size), tensor, axis) for axis, size in enumerate(tensor.shape)]


def _spread(index: torch.Tensor, tensor: DTensor, axis: int) -> torch.Tensor:
    placements = [_on_axis(placement, axis, tensor.dim()) for placement in tensor.placements]
    index = index.to(tensor.to_local().device)
    # Without a source each rank takes its part of what it has; nothing is sent.
    return distribute_tensor(index, tensor.device_mesh, placements, src_data_rank=None).to_local()


def _on_axis(placement: Placement, axis: int, num_axes: int) -> Placement:
    """How one axis of a tensor is spread, as a placement of a list."""
    if not isinstance(placement, Shard | _StridedShard) or placement.dim % num_axes != axis:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def _factors(index: torch.Tensor, axis: int) -> torch.Tensor:
    """Odd numbers that look random, one for each place (the finaliser of SplitMix64)."""
    mixed = index + (axis + 1) * 0x1E3779B97F4A7C15
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) | 1


def names_of(found: Sequence[str], most: int = 3) -> str:
    """For a message."""
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
