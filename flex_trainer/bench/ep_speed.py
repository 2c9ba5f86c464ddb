"""Steps of both implementations in turns, in the same processes: their times, and their bytes on the wire."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from flex_trainer.bench.ep_model import FLEX, MeshSizes, load_model, rank_batch
from flex_trainer.bench.ep_ranks import join_ranks
from flex_trainer.bench.ep_wire import CountExchanges
from flex_trainer.bench.network import sent_bytes
from flex_trainer.config import FlexConfig
from flex_trainer.memory.enforce import return_freed_memory
from flex_trainer.runtime import FlexRuntime

_WARM_UP_STEPS = 3
"""First touches, the trace, the first plans."""


@dataclass
class _Side:
    """One implementation: a model and an optimizer of its own."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    backward: Callable[[], AbstractContextManager[None]]
    runtime: FlexRuntime | None = None

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self.model(**batch).loss
        with self.backward():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def in_turns(
    *,
    path: str,
    batch_size: int,
    sequence_length: int,
    implementations: Sequence[str],
    managed: Sequence[str],
    num_rounds: int,
    returns_memory: bool,
) -> dict[str, Any]:
    """Train a model of each implementation, a step of each in turns, on this rank.

    The same for all: FSDP2 and expert parallelism over all ranks, AdamW, one thread.

    Args:
        managed: those of the implementations whose activations FlexTrainer's runtime manages, with ample memory.
        returns_memory: whether freed memory goes back to the system, for all: on a CPU FlexTrainer has that done.

    Returns:
        By implementation: seconds, CPU seconds and bytes on the link of every timed step; losses of all steps; bytes
        that dispatch and combine send in one step; bytes that mitigations gave back in the timed steps.
    """
    join_ranks()
    torch.set_num_threads(1)
    if returns_memory:
        return_freed_memory()
    num_ranks = torch.distributed.get_world_size()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    rank = torch.distributed.get_rank()
    sides = {
        name: _side(path, MeshSizes(num_ranks, num_ranks), name, name in managed, num_ranks) for name in implementations
    }
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "cpu_seconds": [], "link_bytes": [], "losses": [], "dispatch_bytes": 0} for name in sides
    }
    for number in range(-_WARM_UP_STEPS, num_rounds):
        batch = rank_batch(batch_size, sequence_length, rank, number + _WARM_UP_STEPS)
        for name in list(sides)[:: 1 if number % 2 else -1]:  # no side is always first
            results = found[name]
            count = CountExchanges() if number == -1 else nullcontext()
            torch.distributed.barrier()
            sent, cpu, start = sent_bytes(interface), time.process_time(), time.perf_counter()
            with count:
                results["losses"].append(sides[name].step(batch))
            if number >= 0:
                results["seconds"].append(time.perf_counter() - start)
                results["cpu_seconds"].append(time.process_time() - cpu)
                torch.distributed.barrier()  # the other rank may still be sending
                results["link_bytes"].append(sent_bytes(interface) - sent)
            if isinstance(count, CountExchanges):
                results["dispatch_bytes"] = count.num_bytes
                results["num_all_to_all"] = count.num_calls
    for name, side in sides.items():
        records = [] if side.runtime is None else side.runtime.records[_WARM_UP_STEPS:]
        found[name]["freed_bytes"] = sum(sum(record.freed_bytes.values()) for record in records)
        found[name]["plan_ms"] = [record.plan_ms for record in records]
    torch.distributed.destroy_process_group()
    return found


def _side(path: str, mesh: MeshSizes, implementation: str, is_managed: bool, num_ranks: int) -> _Side:
    model = load_model(path, mesh, implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not is_managed:
        return _Side(model, optimizer, nullcontext)
    assert implementation == FLEX
    runtime = FlexRuntime(FlexConfig(memory_limit=1.0 / num_ranks))
    runtime.attach(model)
    return _Side(model, optimizer, runtime.backward, runtime)
