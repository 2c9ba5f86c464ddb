"""Steps of a spread model whose routers' biases are moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flex_trainer import FlexConfig, FlexRuntime
from flex_trainer.models.router_bias import RouterBiasBalancer, find_biased_routers
from flex_trainer.testing.forced import whole
from tests.distributed.models import all_ids, my_part, spread_model

RATE = 0.001
NUM_STEPS = 5


def balanced(path: str, **parallel: Any) -> list[torch.Tensor]:
    """The biases after some steps of two micro-batches, each with this rank's part of all tokens."""
    model = spread_model(Path(path), **parallel)
    runtime = FlexRuntime(FlexConfig("20GiB", trace=False))
    runtime.attach(model)

    def micro_batch(seed: int) -> None:
        ids = my_part(all_ids(model, seed=seed))
        with runtime.backward():
            model(input_ids=ids, labels=ids).loss.backward()

    biases = steps(model, micro_batch)
    runtime.detach()
    return biases


def steps(model: nn.Module, micro_batch: Any) -> list[torch.Tensor]:
    """Move the biases after every two micro-batches; weights stay, so that choices depend on biases alone."""
    balancer = RouterBiasBalancer(model, RATE)
    for number in range(NUM_STEPS):
        micro_batch(2 * number)
        micro_batch(2 * number + 1)
        balancer.step()
    balancer.remove()
    return [whole(router.bias) for router in find_biased_routers(model)]


def traced(path: str, **parallel: Any) -> tuple[bool, str | None, list[int]]:
    """Whether a spread model is traced while its routers are balanced, why not, and what a micro-batch has counted."""
    model = spread_model(Path(path), **parallel)
    balancer = RouterBiasBalancer(model, RATE)
    runtime = FlexRuntime(FlexConfig("20GiB", trace="auto"))
    runtime.attach(model)
    ids = my_part(all_ids(model))
    with runtime.backward():
        model(input_ids=ids, labels=ids).loss.backward()
    forecast = runtime.part().forecast
    runtime.detach()
    balancer.remove()
    counted = [int(count.sum()) for count in balancer._counts if count is not None]
    return forecast.has_traced, forecast.refusal, [count // ids.numel() for count in counted]
