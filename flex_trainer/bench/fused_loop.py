"""The loop of `flex-trainer bench fused`: the micro-batches of one optimizer step, as Trainer runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator


def accumulate(
    accelerator: Accelerator,
    model: Any,
    batches: Iterable[Mapping[str, torch.Tensor]],
    context: AbstractContextManager[object] | None = None,
) -> list[float]:
    """Forward and backward of each batch; gradients are synchronized in the last one. Returns the losses.

    Args:
        context: forwards run inside of it.
    """
    losses = []
    all_batches = list(batches)
    for number, batch in enumerate(all_batches):
        is_last = number == len(all_batches) - 1
        accelerator.gradient_state._set_sync_gradients(is_last)
        model.set_requires_gradient_sync(is_last)
        moved = {key: value.to(model.device) for key, value in batch.items()}
        with context or nullcontext():
            loss = model(**moved).loss
        accelerator.backward(loss)
        losses.append(loss.detach())
        del loss
    return [float(loss) for loss in losses]
