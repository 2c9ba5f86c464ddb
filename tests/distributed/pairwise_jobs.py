"""Exchanges of rows as receives and sends, on each rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from flex_trainer.experts.pairwise import start_pairwise

WIDTH = 3


def _sizes(generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Rows that this rank receives from each other one and sends to it; some exchange none."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    matrix = torch.randint(0, 4, (num_ranks, num_ranks), generator=generator)
    matrix.fill_diagonal_(0)
    return matrix[:, rank].tolist(), matrix[rank].tolist()


def exchange(num_times: int) -> bool:
    """Several at a time, waited for in another order: whether all bring what torch's all-to-all brings."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    under_way: list[Any] = []
    for number in range(num_times):
        received, sent = _sizes(generator)
        rows = torch.randn(sum(sent), WIDTH) + 100 * number
        output = torch.full((sum(received), WIDTH), torch.nan)
        work = start_pairwise(output, rows, received, sent, group)
        if number % 2:
            work.is_completed()  # has it watched
        under_way.append((work, output, rows, received, sent))
    is_equal = True
    for work, output, rows, received, sent in reversed(under_way):
        work.wait()
        work.wait()  # again is fine
        expected = torch.empty_like(output)
        dist.all_to_all_single(expected, rows, received, sent)
        is_equal &= torch.equal(output, expected)
    return is_equal


def watch() -> dict[str, Any]:
    """Whether an exchange is known to have ended before it is waited for, and who is told."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    sizes = [3, 0] if rank else [0, 3]
    output, told = torch.zeros(3, WIDTH), []
    dist.barrier()
    if rank:
        time.sleep(0.3)
    work = start_pairwise(output, torch.ones(3, WIDTH), sizes, sizes, group)
    work.get_future().add_done_callback(lambda _: told.append(time.perf_counter()))
    was_completed = work.is_completed()
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    is_completed = work.is_completed()
    work.wait()
    return {
        "was_completed": was_completed,
        "is_completed": is_completed,
        "num_told": len(told),
        "sum": float(output.sum()),
    }
