"""Shards as one block each, which is what a distributed checkpoint can write.

FSDP of parameters that are spread already (experts over EP ranks) is written as _StridedShard: applied from left to
right it takes strides, of which the placements to its right leave one block. Example: 8 experts, mesh (efsdp=2, ep=2),
(_StridedShard(0, split_factor=2), Shard(0)):

                        ep rank 0     ep rank 1
    efsdp rank 0        0 1           4 5
    efsdp rank 1        2 3           6 7

Where a strided shard stays in several blocks (packed weights under tensor parallelism), torch would write the blocks as
if they were one. Such a tensor is exchanged to plain shards first.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def as_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where this rank's part is one block of the whole, else a copy in plain shards. All ranks must
    call this for the same tensors in the same order."""
    if not isinstance(tensor, DTensor) or is_one_block(tensor):
        return tensor
    plain = [Shard(of.dim) if isinstance(of, _StridedShard) else of for of in tensor.placements]
    return tensor.redistribute(placements=plain)


def give_back(blocks: torch.Tensor, tensor: DTensor) -> None:
    """Copy what `as_blocks` has made from `tensor` back into it."""
    if blocks is not tensor:
        assert isinstance(blocks, DTensor)
        tensor.copy_(blocks.redistribute(placements=tensor.placements))


def is_one_block(tensor: DTensor) -> bool:
    """Whether every rank's part of the tensor is one block of the whole."""
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            num_parts = 1
            for later_axis, later in enumerate(tensor.placements[axis + 1 :], axis + 1):
                if type(later) is Shard and later.dim == placement.dim:
                    num_parts *= tensor.device_mesh.size(later_axis)
            if num_parts != placement.split_factor:
                return False
    return True
