"""Which rows go where, worked out by hand, and properties that hold for any routing.

Four experts on two ranks, each token's two experts in no order:

    experts        0 1           |  2 3
    rank           0             |  1
    rank 0's t0    0,1           |             one row to rank 0
    rank 0's t1      1           |  2          one row to each
    rank 0's t2                  |  2,3        one row to rank 1
    rank 1's t0    0             |    3        one row to each
    rank 1's t1                  |  2,3        one row to rank 1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.cost.load import EVEN
from flex_trainer.experts.layout import Layout, Outgoing, RecomputeVote
from flex_trainer.models.routing import Routing

Choice = Sequence[Sequence[int]]
"""The experts of each token of a rank."""
DRAWN = ([[0, 1], [2, 1], [2, 3]], [[0, 3], [3, 2]])
YES, MAYBE, NO, BOTH = (
    RecomputeVote(True, False),
    RecomputeVote(False, True),
    RecomputeVote(),
    RecomputeVote(True, True),
)
NEEDS = list(itertools.product((False, True), repeat=2))


def outgoing(choice: Choice, num_local_experts: int, num_ranks: int, num_top_k: int = 2) -> Outgoing:
    index = torch.tensor(choice, dtype=torch.int32).reshape(len(choice), num_top_k)
    return Outgoing.of(index, num_local_experts, num_ranks)


def layouts(
    choices: Sequence[Choice],
    num_local_experts: int = 2,
    num_top_k: int = 2,
    votes: Sequence[RecomputeVote] | None = None,
    needs: Sequence[tuple[bool, bool]] | None = None,
) -> list[Layout]:
    """Of all ranks, each from what all have told it."""
    num_ranks = len(choices)
    sent = [outgoing(choice, num_local_experts, num_ranks, num_top_k) for choice in choices]
    votes, needs = votes or [NO] * num_ranks, needs or [(True, True)] * num_ranks
    headers = [one.header(vote, need) for one, vote, need in zip(sent, votes, needs, strict=True)]
    return [Layout.of(one, torch.stack([header[rank] for header in headers])) for rank, one in enumerate(sent)]


def test_a_token_goes_once_to_each_rank_that_has_an_expert_of_it() -> None:
    first, second = (outgoing(choice, 2, 2) for choice in DRAWN)
    assert first.goes_to.tolist() == [[True, True, False], [False, True, True]]
    assert second.goes_to.tolist() == [[True, False], [True, True]]
    assert first.expert_counts.tolist() == [[1, 2], [2, 1]]
    assert second.expert_counts.tolist() == [[1, 0], [1, 2]]


def test_columns_of_a_header() -> None:
    first, second = (outgoing(choice, 2, 2) for choice in DRAWN)
    # Pairs of both experts there, rows, pairs in all, is_planned, is_acceptable, tokens' gradients, weights' gradients.
    assert first.header(YES, (True, False)).tolist() == [[1, 2, 2, 6, 1, 0, 1, 0, 0], [2, 1, 2, 6, 1, 0, 1, 0, 0]]
    assert second.header(MAYBE, (False, True), 9).tolist() == [[1, 0, 1, 4, 0, 1, 0, 1, 9], [1, 2, 2, 4, 0, 1, 0, 1, 9]]
    assert first.header(NO).dtype == torch.int64


def test_both_sides_of_the_exchange() -> None:
    first, second = layouts(DRAWN)
    assert (first.num_tokens, first.num_top_k, first.num_local_experts) == (3, 2, 2)
    assert (first.sent_sizes, first.received_sizes) == ((2, 2), (2, 1))
    assert (second.sent_sizes, second.received_sizes) == ((1, 2), (2, 2))
    assert (first.num_received, second.num_received) == (3, 4)
    assert first.sent_tokens.tolist() == [0, 1, 1, 2]
    assert second.sent_tokens.tolist() == [0, 0, 1]
    assert (first.num_pairs, second.num_pairs) == (4, 6)
    assert first.num_all_pairs == second.num_all_pairs == 10
    assert first.expert_counts.tolist() == [2, 2] and first.offsets.tolist() == [2, 4]
    assert second.expert_counts.tolist() == [3, 3] and second.offsets.tolist() == [3, 6]
    assert first.offsets.dtype == torch.int32 and first.sent_tokens.dtype == torch.int64


@pytest.mark.parametrize("votes", list(itertools.product((YES, MAYBE, NO, BOTH), repeat=2)))
def test_a_recompute_needs_all_ranks(votes: tuple[RecomputeVote, RecomputeVote]) -> None:
    for layout in layouts(DRAWN, votes=votes):
        assert layout.is_recompute_agreed == (set(votes) <= {YES, BOTH})
        assert layout.is_recompute_acceptable == (NO not in votes)


@pytest.mark.parametrize("needs", list(itertools.product(NEEDS, repeat=2)))
def test_gradients_that_one_rank_needs_are_exchanged_on_all(needs: tuple[tuple[bool, bool], tuple[bool, bool]]) -> None:
    (first_tokens, first_weights), (second_tokens, second_weights) = needs
    for layout in layouts(DRAWN, needs=needs):
        assert layout.needs_gradients == (first_tokens or second_tokens, first_weights or second_weights)


def test_a_rank_without_a_token_has_its_part_of_the_work() -> None:
    full, empty = layouts((DRAWN[0], []))
    assert (empty.num_tokens, empty.sent_sizes, empty.received_sizes) == (0, (0, 0), (2, 0))
    assert empty.sent_tokens.tolist() == []
    assert (empty.num_pairs, empty.num_all_pairs, empty.offsets.tolist()) == (3, 6, [2, 3])
    assert (full.sent_sizes, full.received_sizes, full.num_pairs) == ((2, 2), (2, 0), 3)


def test_a_rank_that_nothing_comes_to() -> None:
    full, empty = layouts(([[0, 1]], [[1, 0]]))
    assert (full.received_sizes, full.num_pairs, full.offsets.tolist()) == ((1, 1), 4, [2, 4])
    assert (empty.sent_sizes, empty.received_sizes) == ((1, 0), (0, 0))
    assert (empty.num_received, empty.num_pairs, empty.offsets.tolist()) == (0, 0, [0, 0])


def test_one_expert_for_each_token() -> None:
    first, second = layouts(([[3], [0], [3]], [[1]]), num_top_k=1)
    assert (first.sent_sizes, first.received_sizes, first.sent_tokens.tolist()) == ((1, 2), (1, 1), [1, 0, 2])
    assert (second.sent_sizes, second.received_sizes, second.sent_tokens.tolist()) == ((1, 0), (2, 0), [0])
    for layout in (first, second):
        assert layout.num_pairs == layout.num_received == 2
    assert (first.offsets.tolist(), second.offsets.tolist()) == ([1, 2], [0, 2])


def test_one_rank() -> None:
    (alone,) = layouts(DRAWN[:1], num_local_experts=4)
    assert alone.sent_sizes == alone.received_sizes == (3,)
    assert alone.sent_tokens.tolist() == [0, 1, 2]
    assert alone.num_pairs == alone.num_all_pairs == 6
    assert (alone.expert_counts.tolist(), alone.offsets.tolist()) == ([1, 2, 2, 1], [1, 3, 5, 6])


@pytest.mark.parametrize(
    ("num_top_k", "num_ranks", "sizes"), [(2, 4, (3, 3, 0, 0)), (2, 2, (3, 3)), (4, 2, (3, 3)), (1, 2, (3, 0))]
)
def test_an_even_layout(num_top_k: int, num_ranks: int, sizes: tuple[int, ...]) -> None:
    even = Layout.even(torch.zeros(3, num_top_k, dtype=torch.int32), 5, num_ranks)
    assert even.sent_sizes == even.received_sizes == sizes
    assert (even.num_tokens, even.num_top_k, even.num_local_experts) == (3, num_top_k, 5)
    assert (even.num_pairs, even.num_all_pairs) == (3 * num_top_k, 3 * num_top_k * num_ranks)
    assert even.sent_tokens.shape == (sum(sizes),) and even.sent_tokens.dtype == torch.int64
    assert even.expert_counts.shape == even.offsets.shape == (5,)
    assert not even.is_recompute_agreed and not even.is_recompute_acceptable
    # Loads are relative to it.
    routing = Routing.exchanged(even)
    assert (routing.load, routing.tokens_ratio) == (EVEN, 1.0)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Sequence[Choice], int, int]:
    """Choices of 1 to 4 ranks, experts of each rank, experts of each token."""
    num_ranks, num_local_experts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = range(num_ranks * num_local_experts)
    num_top_k = draw(st.integers(1, min(len(experts), 4)))
    token = st.permutations(experts).map(lambda order: order[:num_top_k])
    choices = draw(st.lists(st.lists(token, max_size=6), min_size=num_ranks, max_size=num_ranks))
    return choices, num_local_experts, num_top_k


@given(routing=routings())
def test_all_ranks_have_the_same_in_mind(routing: tuple[Sequence[Choice], int, int]) -> None:
    choices, num_local_experts, num_top_k = routing
    ranks = layouts(choices, num_local_experts, num_top_k)
    for sender, receiver in itertools.product(range(len(ranks)), repeat=2):
        assert ranks[sender].sent_sizes[receiver] == ranks[receiver].received_sizes[sender]
    assert sum(layout.num_received for layout in ranks) == sum(len(layout.sent_tokens) for layout in ranks)
    num_all_pairs = num_top_k * sum(map(len, choices))
    assert sum(layout.num_pairs for layout in ranks) == num_all_pairs
    for layout in ranks:
        assert layout.num_all_pairs == num_all_pairs
        assert layout.num_received <= layout.num_pairs <= num_top_k * layout.num_received
        assert layout.offsets[-1] == layout.num_pairs


@given(routing=routings())
def test_every_rank_gets_the_tokens_of_its_experts(routing: tuple[Sequence[Choice], int, int]) -> None:
    choices, num_local_experts, num_top_k = routing
    ranks = layouts(choices, num_local_experts, num_top_k)
    for choice, layout in zip(choices, ranks, strict=True):
        for owner, tokens in enumerate(layout.sent_tokens.split(layout.sent_sizes)):
            owned = range(owner * num_local_experts, (owner + 1) * num_local_experts)
            expected = [number for number, experts in enumerate(choice) if not set(owned).isdisjoint(experts)]
            assert tokens.tolist() == expected
    chosen = [expert for choice in choices for experts in choice for expert in experts]
    counts = torch.cat([layout.expert_counts for layout in ranks]).tolist()
    assert counts == [chosen.count(expert) for expert in range(len(counts))]
