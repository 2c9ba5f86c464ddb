"""This process's rank, and how many there are: of the process group, and of what the launcher has started."""

from __future__ import annotations

import os

import torch


def num_ranks() -> int:
    """Processes in torch's process group; 1 without one."""
    return torch.distributed.get_world_size() if _has_group() else 1


def this_rank() -> int:
    """This one's number among them."""
    return torch.distributed.get_rank() if _has_group() else 0


def num_launched() -> int:
    """Processes that the launcher has started; 1 where none has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This one's number among them."""
    return int(os.environ.get("RANK", "0"))


def is_first_on_machine() -> bool:
    """Whether this process does for its machine what one process must do there."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def num_ranks_here() -> int:
    """Processes of this run on this machine, as launchers say; 1 where none does."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
