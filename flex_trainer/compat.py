"""All that depends on a version of torch, transformers or accelerate. Each entry says when it can go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

__all__ = [
    "DecoderLayer",
    "as_if_real",
    "current_backward",
    "grouped_linear",
    "keeps_graph",
    "local_parameters",
    "release_pinned_cache",
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


def release_pinned_cache() -> None:
    """Give pinned host memory that torch caches and nobody uses back to the system.

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
