"""All that depends on a version of torch, transformers or accelerate. Each entry says when it can go."""

from __future__ import annotations

import torch

# The grouped product with bias and layout handled. Private in transformers 5.24; goes when it is exported.
from transformers.integrations.moe import _grouped_linear as grouped_linear

# What transformers makes of every decoder layer. Public in the module it stands in, not at the top; goes when it is.
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer

__all__ = ["DecoderLayer", "cuda_allocated_bytes", "grouped_linear"]


def cuda_allocated_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes in torch's CUDA tensors: now, and the most since the counter was last reset.

    torch.cuda.memory_stats flattens a hundred statistics into a dictionary, which is too slow to be sampled; goes when
    torch has a quick public way to read two of them.
    """
    allocated = torch._C._cuda_memoryStats(device.index or 0)["allocated_bytes"]["all"]
    return allocated["current"], allocated["peak"]
