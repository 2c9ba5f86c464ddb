"""What all ranks must decide alike: each says a few numbers, and all see those of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flex_trainer.ranks import num_ranks


def agree(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank, in the order of ranks: (R, len(numbers)). Waits for all ranks.

    Args:
        numbers: as many on each rank.
        device: where the process group's collectives work.
    """
    if num_ranks() == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyones = mine.new_empty(num_ranks() * len(numbers))
    dist.all_gather_single(everyones, mine)
    return everyones.view(num_ranks(), len(numbers)).tolist()
