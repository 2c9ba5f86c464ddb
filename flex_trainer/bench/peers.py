"""What a user would pick instead: other ways to hold fewer activations, by the names the benchmarks give them.

| name | what it is |
|---|---|
| plain | everything is kept |
| checkpoint | transformers' gradient checkpointing: each layer runs again in backward |
| every_second_layer | the same for every second layer |
| selective | torch's selective checkpointing of each layer: results of matrix products are saved, the rest runs again |
| trl_offload | TRL's activation offloading |
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

PEERS = ("plain", "checkpoint", "every_second_layer", "selective", "trl_offload")
_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class PeerUnavailableError(Exception):
    """A peer cannot run here; says why."""


def enable(name: str, model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Switch a peer on for a model; its steps run inside of the context that is returned.

    Raises:
        PeerUnavailableError: its package is missing, or it needs a device that is not there.
    """
    if name == "plain":
        return nullcontext()
    if name == "trl_offload":
        return _trl_offload(model)
    options: dict[str, Any] = {"use_reentrant": False}
    if name == "selective":
        operations = [getattr(torch.ops.aten, product).default for product in _MATRIX_PRODUCTS]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, operations)
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=options, every_n_layers=2 if name == "every_second_layer" else 1
    )
    return nullcontext()


def _trl_offload(model: PreTrainedModel) -> AbstractContextManager[Any]:
    try:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager
    except ImportError as error:
        raise PeerUnavailableError(f"TRL cannot be imported: {error}") from error
    if not torch.accelerator.is_available():
        raise PeerUnavailableError("TRL's activation offloading copies to the CPU: it needs an accelerator")
    return get_act_offloading_ctx_manager(model)
