"""How rows get to the ranks that own their experts, and back.

`Transport` has the shape of libraries such as DeepEP: counts first, then `dispatch` and `combine`, each the other's
gradient. `AllToAll` does it with plain collectives, over any backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flex_trainer.experts.handover import Work, wait_for
from flex_trainer.experts.layout import Layout

_HALF = (torch.float16, torch.bfloat16)


class Transport(Protocol):
    """Moves rows; knows nothing of gradients. All ranks of the group call the same methods in the same order."""

    def exchange(self, header: torch.Tensor) -> torch.Tensor:
        """Row r of the (R, C) integers to rank r; returns what every rank had for this one, (R, C)."""
        ...

    def dispatch(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of (N, ...) tensors to the owners of their experts: (M, ...) each, in the order of the sending ranks,
        then of their tokens."""
        ...

    def combine(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of (M, ...) tensors back to where they came from, and the sum over those of each token: (N, ...) each.

        Sums of half precision are made in float32.
        """
        ...


class AllToAll:
    """All-to-all with uneven splits.

    Args:
        group: the ranks that share the experts, in the order of their shares.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def exchange(self, header: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(header)
        wait_for([_started(dist.all_to_all_single(received, header, group=self._group, async_op=True))])
        return received

    def dispatch(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows = [tensor.index_select(0, layout.sent_tokens) for tensor in tensors]
        return self._move(rows, layout.sent_sizes, layout.received_sizes)

    def combine(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        moved = self._move([t.contiguous() for t in tensors], layout.received_sizes, layout.sent_sizes)
        return [_sum_by_token(rows, layout) for rows in moved]

    def _move(
        self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...], received_sizes: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """`sizes[r]` rows of each tensor to rank r."""
        received, works = [], []
        for tensor in tensors:
            buffer = tensor.new_empty((sum(received_sizes), *tensor.shape[1:]))
            work = dist.all_to_all_single(
                buffer, tensor, list(received_sizes), list(sizes), group=self._group, async_op=True
            )
            received.append(buffer)
            works.append(_started(work))
        wait_for(works)
        return received


def _started(work: Any) -> Work:
    assert work is not None, "an asynchronous collective of a rank that is in its group"
    return work


def _sum_by_token(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The sum of the (S, ...) rows of each token: (N, ...)."""
    dtype = torch.float32 if rows.dtype in _HALF else rows.dtype
    total = torch.zeros((layout.num_tokens, *rows.shape[1:]), dtype=dtype, device=rows.device)
    tokens = layout.sent_tokens.split(layout.sent_sizes)
    for part, tokens_there in zip(rows.split(layout.sent_sizes), tokens, strict=True):
        total.index_add_(0, tokens_there, part.to(dtype))
    return total.to(rows.dtype)
