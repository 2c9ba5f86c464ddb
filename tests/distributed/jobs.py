"""What runs on the ranks."""

from __future__ import annotations

import torch


def add_ranks() -> int:
    """The sum of all ranks' numbers."""
    total = torch.tensor(torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    return int(total)


def fail_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    torch.distributed.barrier()
