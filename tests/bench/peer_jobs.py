"""Jobs of the benchmarks' tests that run in a process of their own."""

from __future__ import annotations

from typing import Any

from flex_trainer.bench.child import train


def train_all(sides: list[str], **arguments: Any) -> dict[str, Any]:
    """Every side in turn in one process, from the same weights on the same batches."""
    return {side: train(side=side, **arguments) for side in sides}
