"""Models whose parameters are spread over ranks: not managed in this version."""

from __future__ import annotations

import torch
from torch import nn

from flex_trainer.errors import UserError


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model with parameters that hold only a part of a weight on this rank.

    Weights gathered for a layer would be taken for its activations, and gradients counted at their full size.

    Raises:
        ValueError: the first such parameter (a DTensor of FSDP2 or tensor parallelism), or a module wrapped by FSDP1.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    sharded = [f"parameter {name!r} is a DTensor" for name, p in model.named_parameters() if isinstance(p, DTensor)]
    sharded += [
        f"module {name!r} is wrapped by FullyShardedDataParallel"
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    ]
    if sharded:
        raise UserError(
            f"{type(model).__name__} is sharded over ranks ({sharded[0]}), which FlexTrainer cannot manage in this "
            "version: it needs whole weights on every rank. Use data parallelism (distributed_type: MULTI_GPU in the "
            "accelerate configuration) with a model that fits one device, or transformers' Trainer for a sharded one."
        )
