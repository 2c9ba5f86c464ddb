"""What ranks do each for themselves succeeds on all of them or fails on all of them, with the same words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from flex_trainer.ranks import num_ranks, this_rank

_TORCH_WRITER = ("inline_container", "PytorchStreamWriter")
"""torch.save raises a RuntimeError that names one of these where the system refuses to write."""


class Failure(NamedTuple):
    """What a rank failed with."""

    text: str
    is_refused_by_system: bool
    """Whether the system refused to write or read."""


def gather_failures(error: BaseException | None) -> dict[int, Failure]:
    """What failed, by rank. All ranks must call this.

    Args:
        error: what this rank failed with; None: nothing. Torch's distributed checkpoint raises on every rank what
            failed on some: then only the rank's own failure counts.
    """
    if isinstance(error, CheckpointException):
        own = error.failures.get(this_rank())
        error = None if own is None else own[0]
    failure = None if error is None else Failure(_describe(error), _is_refused_by_system(error))
    if num_ranks() == 1:
        return {} if failure is None else {0: failure}
    failures: list[Failure | None] = [None] * num_ranks()
    torch.distributed.all_gather_object(failures, failure)
    return {rank: failure for rank, failure in enumerate(failures) if failure is not None}


def in_words(failures: Mapping[int, Failure]) -> str:
    """All of them, on one line."""
    return "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failures.items())


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _is_refused_by_system(error: BaseException | None) -> bool:
    while error is not None:
        is_torch_writer = isinstance(error, RuntimeError) and any(name in str(error) for name in _TORCH_WRITER)
        if isinstance(error, OSError | SafetensorError) or is_torch_writer:
            return True
        error = error.__cause__ or error.__context__
    return False
