"""How rows get to the ranks that own their experts, and back.

`Transport` has the shape of libraries such as DeepEP: counts first, then `dispatch` and `combine`, each the other's
gradient. `AllToAll` does it with plain collectives, over any backend of torch.distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flex_trainer.experts.handover import Exchange, WaitHere, Waiting, Work
from flex_trainer.experts.layout import Layout
from flex_trainer.experts.pairwise import start_pairwise


class Transport(Protocol):
    """Moves rows; knows nothing of gradients. All ranks of the group call the same methods in the same order."""

    waiting: Waiting
    """Where another micro-batch can run."""

    def exchange_counts(self, header: torch.Tensor) -> torch.Tensor:
        """Row r of the (R, C) integers to rank r; returns what every rank had for this one, (R, C)."""
        ...

    def count_apart(self) -> None:
        """From now on counts may overtake rows of another micro-batch that are under way. Called by all ranks."""
        ...

    def dispatch(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of (N, ...) tensors to the owners of their experts: (M, ...) each, in an order that is the transport's
        own, and the same each time for one layout."""
        ...

    def combine(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of (M, ...) tensors back to where they came from, and the sum over those of each token: (N, ...) each.

        Sums of half precision are made in float32.
        """
        ...


class AllToAll:
    """All-to-all with uneven splits. Rows of this rank's own experts are not part of it: they come last in what is
    received.

    Args:
        group: the ranks that share the experts, in the order of their shares.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._counts_group = group
        self._rank = dist.get_rank(group)
        self.waiting: Waiting = WaitHere()
        """Where another micro-batch can run."""

    def exchange_counts(self, header: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(header)
        work = _started(dist.all_to_all_single(received, header, group=self._counts_group, async_op=True))
        self.waiting.wait([work], Exchange.COUNTS)
        return received

    def count_apart(self) -> None:
        # A process group exchanges in order, so counts need one of their own for that.
        if self._counts_group is self._group:
            self._counts_group = _twin_of(self._group)

    def dispatch(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent, received = self._sizes(layout)
        own, others = self._tokens(layout)
        num_others = sum(received)
        buffers = [tensor.new_empty((num_others + len(own), *tensor.shape[1:])) for tensor in tensors]
        rows = [tensor.index_select(0, others) for tensor in tensors]
        works = [self._start(b[:num_others], r, received, sent) for b, r in zip(buffers, rows, strict=True)]
        for buffer, tensor in zip(buffers, tensors, strict=True):
            torch.index_select(tensor, 0, own, out=buffer[num_others:])
        self.waiting.wait(works, Exchange.DISPATCH)
        return buffers

    def combine(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent, received = self._sizes(layout)
        num_others, num_own = sum(sent), layout.sent_sizes[self._rank]
        rows = [tensor.contiguous() for tensor in tensors]
        buffers = [tensor.new_empty((num_others + num_own, *tensor.shape[1:])) for tensor in tensors]
        works = [
            self._start(buffer[:num_others], tensor[: sum(received)], sent, received)
            for buffer, tensor in zip(buffers, rows, strict=True)
        ]
        for buffer, tensor in zip(buffers, rows, strict=True):
            buffer[num_others:].copy_(tensor[sum(received) :])
        turns = self._places(layout).split(layout.turn_sizes)
        tokens = layout.sent_tokens.index_select(0, layout.turns).split(layout.turn_sizes)
        self.waiting.wait(works, Exchange.COMBINE)
        return [_sum(layout.num_tokens, buffer, turns, tokens) for buffer in buffers]

    def _places(self, layout: Layout) -> torch.Tensor:
        """Where each row of `layout.turns` lies in a buffer that has this rank's own rows last."""
        own = layout.sent_sizes[self._rank]
        before = sum(layout.sent_sizes[: self._rank])
        after = sum(layout.sent_sizes) - before - own
        turns = layout.turns
        return torch.where(turns < before, turns, torch.where(turns < before + own, turns + after, turns - own))

    def _sizes(self, layout: Layout) -> tuple[list[int], list[int]]:
        """Rows sent to each rank and received from it; none to this one itself."""
        sent, received = list(layout.sent_sizes), list(layout.received_sizes)
        sent[self._rank] = received[self._rank] = 0
        return sent, received

    def _tokens(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of rows that stay here, and of those that go to the other ranks, in their order."""
        start = sum(layout.sent_sizes[: self._rank])
        end = start + layout.sent_sizes[self._rank]
        tokens = layout.sent_tokens
        return tokens[start:end], torch.cat([tokens[:start], tokens[end:]])

    def _start(self, output: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]) -> Work:
        if rows.device.type == "cpu":
            return start_pairwise(output, rows, received, sent, self._group)
        return _started(dist.all_to_all_single(output, rows, received, sent, group=self._group, async_op=True))


@functools.cache
def _twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, one for all layers."""
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    twin = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup), "this rank is in it"
    return twin


def _started(work: Any) -> Work:
    assert work is not None, "an asynchronous collective of a rank that is in its group"
    return work


def _sum(
    num_tokens: int, rows: torch.Tensor, turns: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor]
) -> torch.Tensor:
    """(N, ...) sums of the (S, ...) rows of each token, half precision in float32. As many kernels as turns."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((num_tokens, *rows.shape[1:]), dtype=dtype, device=rows.device)
    for places, of_token in zip(turns, tokens, strict=True):
        total.index_add_(0, of_token, rows.index_select(0, places).to(dtype))
    return total.to(rows.dtype)
