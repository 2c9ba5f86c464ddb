"""All that depends on a version of torch, transformers or accelerate. Each entry says when it can go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Puts the local parts in place of a module's sharded parameters for as long as a context lasts. Private in transformers
# 5.24; goes when torch modules take local parameters by themselves.
from transformers.distributed.parallel_utils import _use_local_dtensor_params as local_parameters

# The grouped product with bias and layout handled. Private in transformers 5.24; goes when it is exported.
from transformers.integrations.moe import _grouped_linear as grouped_linear

# What transformers makes of every decoder layer. Public in the module it stands in, not at the top; goes when it is.
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer
from transformers.utils import import_utils

__all__ = ["DecoderLayer", "as_if_real", "grouped_linear", "is_in_backward", "local_parameters", "release_pinned_cache"]


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
    """Whether this thread runs a backward: a forward that runs now is a recomputation.

    torch 2.13 has no public function for it (its own checkpointing uses this one); goes when there is one.
    """
    return torch._C._current_graph_task_id() != -1


def release_pinned_cache() -> None:
    """Give pinned host memory that torch caches and nobody uses back to the system.

    torch.cuda.empty_cache leaves the host's side alone; goes when torch 2.13's private function is public.
    """
    torch._C._host_emptyCache()
