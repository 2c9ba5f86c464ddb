"""Whole steps under the runtime's own plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flex_trainer import FlexConfig, FlexRuntime
from tests.distributed.models import all_ids, my_part, spread_model


def predicted_and_held(path: str, num_steps: int, **parallel: Any) -> list[dict[str, Any]]:
    """For every step: what was predicted before it, what was held at the end of forward."""
    model = spread_model(Path(path), **parallel)
    runtime = FlexRuntime(FlexConfig(memory_limit="20GiB"))
    runtime.attach(model)
    for number in range(num_steps):
        ids = my_part(all_ids(model, seed=number))
        with runtime.backward():
            model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    runtime.detach()
    return [
        {
            "profile": record.is_profile,
            "predicted": record.predicted_bytes,
            "actual": record.actual_bytes,
            "replans": record.num_replans,
            "imbalance": record.imbalance,
        }
        for record in runtime.records
    ]
