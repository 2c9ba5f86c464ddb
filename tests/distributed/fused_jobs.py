"""Optimizer steps of several micro-batches, with and without a backward beside each forward."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from flex_trainer import FlexConfig, FlexPlugin
from flex_trainer.planner.fusion import Side
from flex_trainer.runtime import FlexRuntime
from flex_trainer.steps.order_choice import OrderChoice
from flex_trainer.testing.forced import ForcedRuntime, whole
from tests.distributed.equality_jobs import Forced
from tests.distributed.models import all_ids, gradients_of, my_part, skew, spread_model


def accelerator_of(accumulation: int) -> Accelerator:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation)


def steps(
    path: str,
    *,
    fuse: tuple[bool, ...],
    num_steps: int,
    accumulation: int,
    strategy: str | None = None,
    limit: str = "20GiB",
    is_skewed: bool = False,
    has_autocast: bool = False,
    is_uneven: bool = False,
    order_seed: int | None = None,
    options: dict[str, Any] | None = None,
    **parallel: Any,
) -> list[dict[str, Any]]:
    """For each of `fuse`: losses, the gradients of the last step and the weights after it (rank 0), and how many
    forwards had a backward beside them.

    Args:
        strategy: of `equality_jobs.STRATEGIES`; None: planned under `limit`.
        is_skewed: all tokens go to the first experts, those of rank 0.
        is_uneven: the ranks' sequences differ in length, and those of a rank from micro-batch to micro-batch.
        order_seed: sides take turns at random, alike on all ranks; None: as it is decided.
        options: of `from_pretrained`.
    """
    answers = []
    for is_fused in fuse:
        accelerator = accelerator_of(accumulation)
        model: Any = spread_model(Path(path), **parallel, **(options or {}))
        if is_skewed:
            skew(model)
        torch.manual_seed(100 + dist.get_rank())  # dropout
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plugin = FlexPlugin(FlexConfig(memory_limit=limit, fuse=is_fused))
        if strategy is not None:
            plugin.runtime = runtime_of(strategy, is_fused)
        plugin.attach(accelerator, model)
        if plugin.fused is not None and order_seed is not None:
            take_random_orders(plugin.fused.choice, order_seed)
        losses, gradients = [], {}
        for step in range(num_steps):
            for number in range(accumulation):
                is_last = number == accumulation - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                model.set_requires_gradient_sync(is_last)
                ids = my_part(all_ids(model, seed=10 * step + number))
                if is_uneven:
                    ids = ids[:, : 96 - 17 * ((step + number + 2 * dist.get_rank()) % 5)]
                with torch.autocast("cpu", torch.bfloat16) if has_autocast else nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                losses.append(float(loss.detach()))
            gradients = gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
        num_pairs = 0 if plugin.fused is None else plugin.fused.num_pairs
        records = list(plugin.runtime.records)
        plugin.detach()
        weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
        is_first = dist.get_rank() == 0
        answers.append(
            {
                "losses": losses,
                "gradients": gradients if is_first else None,
                "weights": weights if is_first else None,
                "num_pairs": num_pairs,
                "num_records": len(records),
                "freed": sum(sum(record.freed_bytes.values()) for record in records),
            }
        )
    return answers


def take_random_orders(choice: OrderChoice, seed: int) -> None:
    """Another order for each pair."""
    stream, choose = random.Random(seed), choice.choose

    def choose_any() -> None:
        choose()
        choice.order = tuple(stream.choices((Side.FORWARD, Side.BACKWARD), k=500))

    choice.choose = choose_any
    choice.order = tuple(stream.choices((Side.FORWARD, Side.BACKWARD), k=500))


def runtime_of(strategy: str, is_fused: bool) -> FlexRuntime:
    """A runtime under given choices."""
    runtime = ForcedRuntime(Forced(strategy))
    runtime.config = FlexConfig(
        memory_limit="20GiB", strategies=("recompute", "offload", "quantize"), trace=False, fuse=is_fused
    )
    return runtime
