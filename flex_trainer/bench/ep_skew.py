"""All tokens go to the experts of rank 0, under a real cap on every process: the work of one rank, and the comparison.

The routers' correction biases favour rank 0's experts, in the checkpoint that both implementations load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from flex_trainer.bench.ep_model import FLEX, NATIVE, SKEW, MeshSizes, load_model, rank_batch, write_model
from flex_trainer.bench.ep_ranks import RankResult, join_ranks, run_ranks, values_of
from flex_trainer.bench.shapes import BenchShape
from flex_trainer.config import FlexConfig
from flex_trainer.memory.enforce import enforce_process_limit, return_freed_memory
from flex_trainer.memory.process import process_memory
from flex_trainer.models.discovery import find_experts
from flex_trainer.runtime import FlexRuntime

CAP_SHARE = 0.6
"""Where the cap lies between the native peaks of the rank that gets nothing (0) and of the one that gets all (1)."""
NUM_STEPS = 4
_NUM_RANKS = 2
_WARM_UP_TOKENS = 64
_OUT_OF_MEMORY = "can't allocate memory"


def measure_skew(
    shape: BenchShape = SKEW, num_steps: int = NUM_STEPS, console: Console | None = None
) -> dict[str, Any]:
    """Figures of requirement 2: native without a cap, native and FlexTrainer under one."""
    console = console or Console(stderr=True)
    num_experts = shape.config["n_routed_experts"]
    with tempfile.TemporaryDirectory(prefix="flex-bench-") as directory:
        path = write_model(shape, directory, favoured_experts=num_experts // _NUM_RANKS)
        console.print("skew: native without a cap", highlight=False)
        free = values_of(_run(path, shape, num_steps, NATIVE, None), "native without a cap")
        peaks = [rank["peak_bytes"] for rank in free]
        cap_bytes = int(peaks[1] + CAP_SHARE * (peaks[0] - peaks[1]))
        console.print(f"skew: native, then FlexTrainer, under {cap_bytes / 2**20:.0f} MiB each", highlight=False)
        native = _run(path, shape, num_steps, NATIVE, cap_bytes)
        flex = _run(path, shape, num_steps, FLEX, cap_bytes)
    return {
        "num_steps": num_steps,
        "share_to_rank_0": min(rank["share_to_rank_0"] for rank in free),
        "native_peak_mib": [peak / 2**20 for peak in peaks],
        "cap_mib": cap_bytes / 2**20,
        "native_dies_on_rank_0": _OUT_OF_MEMORY in native[0].error,
        "native_error": native[0].error.splitlines()[0][:200] if native[0].error else "",
        "native_dies_on_rank_1_by_itself": _OUT_OF_MEMORY in native[1].error,
        **_compared(flex, free, num_steps),
    }


def _compared(flex: Sequence[RankResult], free: Sequence[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """FlexTrainer under the cap against native without one."""
    errors = [result.error for result in flex]
    if any(errors):
        return {
            "flex_finishes": False,
            "flex_errors": errors,
            "flex_stderr": [result.stderr[-1500:] for result in flex],
            "loss_error": None,
            "other_ranks_keep_all": False,
        }
    ours = [result.value for result in flex]
    pairs = [
        (mine, other)
        for rank, reference in zip(ours, free, strict=True)
        for mine, other in zip(rank["losses"], reference["losses"], strict=True)
    ]
    freed = [[sum(record["freed_bytes"].values()) for record in rank["records"]] for rank in ours]
    return {
        "flex_finishes": all(len(rank["losses"]) == num_steps for rank in ours),
        "flex_peak_mib": [rank["peak_bytes"] / 2**20 for rank in ours],
        "loss_error": max(abs(mine - other) / abs(other) for mine, other in pairs),
        "freed_mib": [[num_bytes / 2**20 for num_bytes in rank] for rank in freed],
        "num_unplanned": [sum(record["is_profile"] for record in rank["records"]) for rank in ours],
        "other_ranks_keep_all": not any(num_bytes for rank in freed[1:] for num_bytes in rank),
    }


def _run(path: Path, shape: BenchShape, num_steps: int, implementation: str, cap_bytes: int | None) -> list[RankResult]:
    arguments = {
        "path": str(path),
        "batch_size": shape.batch_size,
        "sequence_length": shape.sequence_length,
        "implementation": implementation,
        "num_steps": num_steps,
        "cap_bytes": cap_bytes,
    }
    return run_ranks("flex_trainer.bench.ep_skew:train", arguments, _NUM_RANKS)


def train(
    *,
    path: str,
    batch_size: int,
    sequence_length: int,
    implementation: str,
    num_steps: int,
    cap_bytes: int | None,
) -> dict[str, Any]:
    """Train on this rank, the cap enforced once the model is loaded; FlexTrainer's runtime manages "flex" under it.

    Returns:
        Losses of this rank's batches, the share of them that rank 0's experts get, the resident peak, and the runtime's
        records.
    """
    join_ranks()
    torch.set_num_threads(1)
    return_freed_memory()
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = load_model(path, MeshSizes(num_ranks, num_ranks), implementation)
    _warm_up(model, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runtime: FlexRuntime | None = None
    if implementation == FLEX:
        runtime = FlexRuntime(FlexConfig("auto" if cap_bytes is None else cap_bytes))
        runtime.attach(model)
    batches = [rank_batch(batch_size, sequence_length, rank, number) for number in range(num_steps)]
    if cap_bytes is not None:
        enforce_process_limit(cap_bytes)
    losses = []
    with _counted(model) as share:
        for batch in batches:
            loss = model(**batch).loss
            with nullcontext() if runtime is None else runtime.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            del loss
    records = [] if runtime is None else runtime.records
    torch.distributed.destroy_process_group()
    return {
        "losses": losses,
        "share_to_rank_0": share(),
        "peak_bytes": process_memory().peak_rss_bytes,
        "records": [{**vars(record), "freed_bytes": dict(record.freed_bytes)} for record in records],
    }


def _warm_up(model: nn.Module, rank: int) -> None:
    """What a process takes once, whatever it trains, comes before the cap: stacks of threads, buffers of libraries."""
    model(**rank_batch(1, _WARM_UP_TOKENS, rank)).loss.backward()
    model.zero_grad()


@contextmanager
def _counted(model: nn.Module) -> Iterator[Callable[[], float]]:
    """Count inside; gives the share of this rank's pairs of a token and an expert that go to rank 0's experts."""
    counts = {"all": 0, "first": 0}

    def count(experts: Any, args: tuple[Any, ...]) -> None:
        top_k_index = args[1]
        counts["all"] += top_k_index.numel()
        counts["first"] += int((top_k_index < experts.num_experts).sum())

    handles = [experts.register_forward_pre_hook(count) for experts in find_experts(model)]
    try:
        yield lambda: counts["first"] / counts["all"]
    finally:
        for handle in handles:
            handle.remove()
