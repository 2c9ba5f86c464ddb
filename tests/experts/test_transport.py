"""Rows to other ranks and back, without any: the collective is stood in for, and what is done around it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from flex_trainer.experts.autograd import combine, dispatch
from flex_trainer.experts.handover import WaitHere, Waiting
from flex_trainer.experts.layout import Layout, Outgoing, RecomputeVote
from flex_trainer.experts.transport import AllToAll

NUM_TOKENS, NUM_TOP_K, WIDTH = 24, 2, 5


class CountKernels(TorchDispatchMode):
    """Counts operations that compute or copy; views cost a device nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view and "empty" not in function.name() and "split" not in function.name()
        return function(*args, **(kwargs or {}))


class Done:
    def wait(self) -> None:
        pass


class Mirror(AllToAll):
    """Every other rank sends what this rank sends to it: rows come back as they are."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.waiting: Waiting = WaitHere()

    def _start(self, output: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]) -> Any:
        output.copy_(rows)
        return Done()


def layout_of(num_ranks: int, rank: int) -> tuple[Layout, torch.Tensor]:
    """A layout in which every rank sends to this one what this one sends to it, and the experts of its tokens."""
    generator = torch.Generator().manual_seed(num_ranks)
    index = torch.stack([torch.randperm(num_ranks, generator=generator)[:NUM_TOP_K] for _ in range(NUM_TOKENS)])
    outgoing = Outgoing.of(index, num_local_experts=1, num_ranks=num_ranks)
    return Layout.of(outgoing, outgoing.header(RecomputeVote())), index


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (4, 2), (16, 0), (16, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_ranks(num_ranks: int, rank: int, dtype: torch.dtype) -> None:
    layout, index = layout_of(num_ranks, rank)
    transport = Mirror(rank)
    tokens = torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    (rows,) = transport.dispatch(layout, [tokens])
    (back,) = transport.combine(layout, [rows])
    num_ranks_of_token = torch.tensor([len(set(experts)) for experts in index.tolist()]).unsqueeze(1)
    assert torch.equal(back, (tokens.float() * num_ranks_of_token).to(dtype)) and back.dtype == dtype
    (again,) = transport.combine(layout, [rows])
    assert torch.equal(again, back)


def kernels(num_ranks: int) -> tuple[int, int]:
    layout, _ = layout_of(num_ranks, 1)
    transport = Mirror(1)
    tokens = torch.randn(NUM_TOKENS, WIDTH)
    with CountKernels() as there:
        rows = transport.dispatch(layout, [tokens, tokens])
    with CountKernels() as back:
        transport.combine(layout, rows)
    return there.count, back.count


def test_the_number_of_kernels_does_not_grow_with_the_number_of_ranks() -> None:
    assert kernels(4) == kernels(16) == kernels(64)
    assert sum(kernels(4)) <= 30


def test_no_token_comes_twice_in_one_turn() -> None:
    for num_ranks in (1, 2, 4, 16):
        index = torch.stack([torch.randperm(16)[:NUM_TOP_K] for _ in range(NUM_TOKENS)])
        outgoing = Outgoing.of(index, num_local_experts=16 // num_ranks, num_ranks=num_ranks)
        layout = Layout.of(outgoing, outgoing.header(RecomputeVote()))
        assert len(layout.turn_sizes) == min(num_ranks, NUM_TOP_K) and sum(layout.turn_sizes) == sum(layout.sent_sizes)
        assert sorted(layout.turns.tolist()) == list(range(sum(layout.sent_sizes)))
        for turn in layout.turns.split(layout.turn_sizes):
            of_turn = layout.sent_tokens[turn].tolist()
            assert len(of_turn) == len(set(of_turn))
        assert sorted(layout.sent_tokens[layout.turns[: layout.turn_sizes[0]]].tolist()) == list(range(NUM_TOKENS))


def test_what_backward_needs_of_a_layout_is_saved_where_it_is_seen() -> None:
    """Numbers of rows are large, and autograd would hold them out of sight if they hung on its context."""
    layout, index = layout_of(4, 1)
    sizes, numbers = layout.split()
    assert sizes.sent_tokens.numel() == sizes.turns.numel() == 0
    rows = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
    weights = torch.rand(NUM_TOKENS, NUM_TOP_K, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        received, _, _ = dispatch(Mirror(1), sizes, rows, weights, index, *numbers)
        output = combine(Mirror(1), sizes, received, *numbers)
    assert set(saved) == {number.untyped_storage().data_ptr() for number in numbers}
    # As many bytes as tokens may make rows, whatever the router has chosen.
    assert {number.untyped_storage().nbytes() for number in numbers} == {8 * NUM_TOKENS * NUM_TOP_K}
    output.sum().backward()
    num_ranks_of_token = torch.tensor([len(set(experts)) for experts in index.tolist()]).unsqueeze(1)
    assert rows.grad is not None and torch.equal(rows.grad, num_ranks_of_token.expand(-1, WIDTH).float())
