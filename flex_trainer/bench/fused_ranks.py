"""One rank of `flex-trainer bench fused`: steps of several micro-batches, each way of running them in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from flex_trainer.bench.ep_model import FLEX, MeshSizes, load_model, rank_batch
from flex_trainer.bench.ep_ranks import join_ranks
from flex_trainer.bench.fused_equality_rank import Chosen
from flex_trainer.bench.fused_loop import accumulate
from flex_trainer.config import FlexConfig
from flex_trainer.planner.fusion import Side
from flex_trainer.plugin import FlexPlugin
from flex_trainer.testing.forced import ForcedRuntime

_WARM_UP_STEPS = 1
"""First touches, traces, first orders."""


class Way:
    """One way of running steps: a model, an optimizer and a plugin of its own.

    Args:
        fuse: as in `FlexConfig`.
        strategies: as in `FlexConfig`; None: its own ones.
        choices: of `fused_equality_rank.CHOICES`; None: planned under `memory_limit`.
        pattern: a fixed order, letters F and B of a layer, again and again; None: as it is planned.
    """

    def __init__(
        self,
        path: str,
        memory_limit: str,
        accumulation: int,
        *,
        fuse: str | bool,
        strategies: Sequence[str] | None = None,
        choices: str | None = None,
        pattern: str | None = None,
    ) -> None:
        num_ranks = torch.distributed.get_world_size()
        self.model: PreTrainedModel = load_model(path, MeshSizes(num_ranks, num_ranks), FLEX)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=accumulation)
        config = FlexConfig(memory_limit=memory_limit, fuse=fuse)
        self.plugin = FlexPlugin(config if strategies is None else replace(config, strategies=tuple(strategies)))
        if choices is not None:
            self.plugin.runtime = ForcedRuntime(Chosen(choices), fuse=fuse)
        self.plugin.attach(self._accelerator, self.model)
        if pattern is not None and self.plugin.fused is not None:
            num_layers = self.model.config.num_hidden_layers
            self.plugin.fused.choice.fix(tuple(map(Side, pattern * (2 * num_layers))))

    def step(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
        """One optimizer step, as Trainer makes it. Returns the losses."""
        losses = accumulate(self._accelerator, self.model, batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def in_turns(**arguments: Any) -> dict[str, dict[str, Any]]:
    """Join the ranks, and measure: arguments and answer are those of `measure_ways`."""
    join_ranks()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # Accelerate asks for them; the group is there already
    torch.set_num_threads(1)
    found = measure_ways(**arguments)
    torch.distributed.destroy_process_group()
    return found


def measure_ways(
    *,
    path: str,
    batch_size: int,
    sequence_length: int,
    accumulation: int,
    memory_limit: str,
    ways: Mapping[str, Mapping[str, Any]],
    num_rounds: int,
) -> dict[str, dict[str, Any]]:
    """A step of each way in turns, on this rank.

    Args:
        ways: by name: arguments of `Way`.

    Returns:
        By way: seconds and CPU seconds of every timed step, losses of all steps, and from the records of the timed
        steps: exchange, exposed, pair and predicted pair times in ms, peaks in bytes, bytes freed. Of the whole run:
        seconds, pairs, and seconds spent on choices of an order.
    """
    rank = torch.distributed.get_rank()
    all_ways = {name: Way(path, memory_limit, accumulation, **way) for name, way in ways.items()}
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "cpu_seconds": [], "losses": [], "run_seconds": 0.0} for name in all_ways
    }
    for number in range(-_WARM_UP_STEPS, num_rounds):
        first = (number + _WARM_UP_STEPS) * accumulation
        batches = [rank_batch(batch_size, sequence_length, rank, first + one) for one in range(accumulation)]
        for name in list(all_ways)[:: 1 if number % 2 else -1]:  # no way is always first
            torch.distributed.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            found[name]["losses"] += all_ways[name].step(batches)
            torch.distributed.barrier()
            seconds = time.perf_counter() - start
            found[name]["run_seconds"] += seconds
            if number >= 0:
                found[name]["seconds"].append(seconds)
                found[name]["cpu_seconds"].append(time.process_time() - cpu)
    for name, way in all_ways.items():
        records = list(way.plugin.runtime.records)[_WARM_UP_STEPS * accumulation :]
        fields = ("exchange_ms", "exposed_ms", "pair_ms", "predicted_pair_ms", "run_ms", "plan_ms", "peak_bytes")
        found[name] |= {field: [getattr(record, field) for record in records] for field in fields}
        found[name]["freed_bytes"] = sum(sum(record.freed_bytes.values()) for record in records)
        fused = way.plugin.fused
        found[name]["num_pairs"] = 0 if fused is None else fused.num_pairs
        found[name]["choice_seconds"] = 0.0 if fused is None else fused.choice.seconds
        if fused is not None and fused.choice.window is not None:
            window = fused.choice.window
            stages = (*window.forward, *window.backward)
            found[name]["compute_ms"] = 1e3 * sum(stage.seconds for stage in stages)
            found[name]["exchange_alone_ms"] = 1e3 * sum(stage.exchange_seconds for stage in stages)
            found[name]["order"] = "".join(side.value for side in fused.choice.order)
        way.plugin.detach()
    return found
