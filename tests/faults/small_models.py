"""Two-layer models and one step of them."""

from __future__ import annotations

from typing import Any

import torch

from flex_trainer.testing.tiny import FAMILIES, tiny_batch, tiny_model
from tests.faults.outcomes import Forward

MOE_FAMILIES = [name for name in FAMILIES if name not in ("llama", "qwen3")]


def small(architecture: str = "qwen3_moe", **options: Any) -> Any:
    return tiny_model(architecture, num_hidden_layers=2, **options)


def one_step(model: Any, **more: Any):
    inputs = {**tiny_batch(model, 2, 10), "use_cache": False, **more}

    def body(forward: Forward) -> list[torch.Tensor]:
        loss = forward(**inputs).loss
        loss.backward()
        return [loss]

    return body
