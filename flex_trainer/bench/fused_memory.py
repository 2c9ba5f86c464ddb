"""Requirement 4 of `flex-trainer bench fused`: spikes under a memory limit while forward and backward run together."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from flex_trainer.bench.ep_model import FLEX, SPEED, MeshSizes, load_model, write_model
from flex_trainer.bench.ep_ranks import join_ranks, run_ranks, values_of
from flex_trainer.bench.fused_loop import accumulate
from flex_trainer.config import FlexConfig
from flex_trainer.memory.enforce import process_limit, return_freed_memory
from flex_trainer.memory.process import process_memory
from flex_trainer.plugin import FlexPlugin
from flex_trainer.testing.tiny import tiny_batch

SHAPE = replace(SPEED, name="spikes", config={**SPEED.config, "num_hidden_layers": 4}, batch_size=4, sequence_length=96)
SPIKE = 2.6
"""Tokens of a spike over those of others."""
_SPIKE_SHARE = 0.1
_ROOM_SHARE = 0.75
"""The limit leaves this share of what a spike takes with everything kept: neither a spike nor two others beside each
other fit so."""
_ACCUMULATION = 4
_NUM_MICRO_BATCHES = 300


def measure_memory(console: Console, *, is_quick: bool) -> dict[str, Any]:
    """Micro-batches with spikes anywhere, on each rank at places of its own: under a limit, and under a real cap.

    Returns:
        Peaks over the limit, the highest peak over the limit in both, how many forwards had a backward beside them, how
        far their peaks were from what was predicted, and whether the losses are those of a run without a limit, one
        after the other.
    """
    num_micro_batches = 24 if is_quick else _NUM_MICRO_BATCHES
    console.print(f"memory: {num_micro_batches} micro-batches, three times", highlight=False)
    with tempfile.TemporaryDirectory(prefix="flex-bench-") as directory:
        path = str(write_model(SHAPE, directory))
        found = {
            name: run_ranks(
                "flex_trainer.bench.fused_memory:with_spikes",
                {"path": path, "num_micro_batches": num_micro_batches, "is_limited": is_limited, "has_cap": has_cap},
                2,
            )
            for name, is_limited, has_cap in (("ample", False, False), ("limit", True, False), ("cap", True, True))
        }
    ample, limited = (values_of(found[name], name) for name in ("ample", "limit"))
    capped = [result.value for result in found["cap"]]
    peak_errors = [error for rank in limited for error in rank["pair_peak_errors"]]
    return {
        "num_micro_batches": num_micro_batches,
        "num_spikes": [rank["num_spikes"] for rank in limited],
        "num_pairs": [rank["num_pairs"] for rank in limited],
        "num_over_limit": sum(rank["num_over_limit"] for rank in limited),
        "peak_share": max(rank["peak_share"] for rank in limited),
        "median_peak_share": max(rank["median_peak_share"] for rank in limited),
        "pair_peak_error_percent": statistics.mean(peak_errors) if peak_errors else None,
        "worst_pair_peak_error_percent": max(peak_errors, default=None),
        "freed_mib": [rank["freed_bytes"] / 2**20 for rank in limited],
        "finishes_under_a_cap": all(value is not None for value in capped),
        "cap_errors": [result.error for result in found["cap"]],
        "has_equal_losses": all(one["losses"] == other["losses"] for one, other in zip(ample, limited, strict=True))
        and all(one is not None and one["losses"] == other["losses"] for one, other in zip(capped, ample, strict=True)),
    }


def with_spikes(*, path: str, num_micro_batches: int, is_limited: bool, has_cap: bool) -> dict[str, Any]:
    """Train on this rank; without a limit one after the other, with one together."""
    join_ranks()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    return_freed_memory()
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model: Any = load_model(path, MeshSizes(num_ranks, num_ranks), FLEX)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=_ACCUMULATION)
    spike_length = int(SPIKE * SHAPE.sequence_length)
    # Everything that comes once has come by then, and what a spike takes is known.
    plugin = FlexPlugin(FlexConfig(memory_limit="6GiB", fuse=is_limited))
    warm_up = _Run(accelerator, model, optimizer, plugin)
    warm_up.train([spike_length, SHAPE.sequence_length] * _ACCUMULATION)
    spike_bytes = max(record.peak_bytes - record.baseline_bytes for record in plugin.runtime.records)
    plugin.detach()
    lengths = _lengths(num_micro_batches, rank)
    if not is_limited:
        plugin = FlexPlugin(FlexConfig(memory_limit="6GiB", fuse=False))
        losses = _Run(accelerator, model, optimizer, plugin).train(lengths)
        plugin.detach()
        torch.distributed.destroy_process_group()
        return {"losses": losses}
    limit_bytes = process_memory().rss_bytes + int(_ROOM_SHARE * spike_bytes)
    plugin = FlexPlugin(FlexConfig(memory_limit=limit_bytes, fuse=True))
    run = _Run(accelerator, model, optimizer, plugin)
    with process_limit(limit_bytes) if has_cap else nullcontext():
        losses = run.train(lengths)
    records = list(plugin.runtime.records)
    peaks = sorted(record.peak_bytes / limit_bytes for record in records)
    result = {
        "losses": losses,
        "num_spikes": sum(length == spike_length for length in lengths),
        "num_pairs": plugin.fused.num_pairs if plugin.fused is not None else 0,
        "num_over_limit": sum(record.is_over_limit for record in records),
        "peak_share": peaks[-1],
        "median_peak_share": peaks[len(peaks) // 2],
        "pair_peak_errors": [
            100 * abs(record.predicted_peak_bytes / record.peak_bytes - 1)
            for record in records
            if record.pair_ms and record.predicted_peak_bytes
        ],
        "freed_bytes": sum(sum(record.freed_bytes.values()) for record in records),
    }
    plugin.detach()
    torch.distributed.destroy_process_group()
    return result


class _Run:
    """A loop of Accelerate's."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, plugin: FlexPlugin):
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        plugin.attach(accelerator, model)

    def train(self, lengths: list[int]) -> list[float]:
        """Losses of micro-batches of these lengths."""
        losses: list[float] = []
        for first in range(0, len(lengths), _ACCUMULATION):
            numbers = range(first, min(first + _ACCUMULATION, len(lengths)))
            batches = (self._batch(number, lengths[number]) for number in numbers)
            losses += accumulate(self._accelerator, self._model, batches)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return losses

    def _batch(self, number: int, length: int) -> dict[str, torch.Tensor]:
        return tiny_batch(self._model, SHAPE.batch_size, length, seed=10 * number + torch.distributed.get_rank())


def _lengths(num_micro_batches: int, rank: int) -> list[int]:
    stream = random.Random(rank)
    spike = int(SPIKE * SHAPE.sequence_length)
    return [
        spike if stream.random() < _SPIKE_SHARE else stream.randint(SHAPE.sequence_length // 2, SHAPE.sequence_length)
        for _ in range(num_micro_batches)
    ]
