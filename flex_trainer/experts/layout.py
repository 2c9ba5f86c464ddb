"""Which rows go where: computed from the router's choice on the sender, from exchanged counts on both sides.

A token goes once to each rank that owns any of its experts, whatever the number of its experts there. With E experts in
equal, contiguous shares on R ranks, rank r owns experts r E/R to (r + 1) E/R - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class RecomputeVote:
    """What a rank says of recomputing this layer's dispatch in backward, before it knows what it will receive."""

    is_planned: bool = False
    """Its plan recomputes the dispatch, if all ranks do."""
    is_acceptable: bool = False
    """It would agree, had it planned for it."""


_NUM_FACTS = 7
"""Columns of a header besides the counts of experts."""


@dataclass(frozen=True)
class Outgoing:
    """What this rank will send of one layer; nothing here waits for the device."""

    top_k_index: torch.Tensor
    """(N, K), global expert ids."""
    goes_to: torch.Tensor
    """(R, N), bool: whether a token goes to a rank."""
    expert_counts: torch.Tensor
    """(R, E/R), int64: pairs of a token and an expert, by the expert's owner."""

    @classmethod
    def of(cls, top_k_index: torch.Tensor, num_local_experts: int, num_ranks: int) -> Outgoing:
        """
        Args:
            top_k_index: (N, K), global expert ids, each in [0, E).
        """
        num_tokens = top_k_index.size(0)
        device = top_k_index.device
        experts = top_k_index.long()
        owners = experts // num_local_experts
        tokens = torch.arange(num_tokens, device=device).unsqueeze(1)
        goes_to = torch.zeros(num_ranks * num_tokens, dtype=torch.bool, device=device)
        goes_to[(owners * num_tokens + tokens).reshape(-1)] = True
        flat = experts.reshape(-1)
        counts = torch.zeros(num_ranks * num_local_experts, dtype=torch.int64, device=device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        return cls(experts, goes_to.view(num_ranks, num_tokens), counts.view(num_ranks, num_local_experts))

    def header(self, vote: RecomputeVote, needs: tuple[bool, bool] = (True, True), sequence: int = 0) -> torch.Tensor:
        """What every rank is told before the rows: (R, E/R + 7), int64; pairs by expert, rows, the pairs of this rank's
        tokens with all experts, the two parts of the vote, whether tokens and weights need gradients, and a number that
        stands for the exchanges so far."""
        num_rows = self.goes_to.sum(dim=1, dtype=torch.int64)
        # Filled on the device: a tensor of numbers from the host would be waited for.
        numbers = (self.top_k_index.numel(), vote.is_planned, vote.is_acceptable, *needs, sequence)
        facts = [torch.full_like(num_rows, int(number)) for number in numbers]
        return torch.cat([self.expert_counts, torch.stack([num_rows, *facts], dim=1)], dim=1)


@dataclass(frozen=True)
class Layout:
    """Rows sent and received by one rank in one layer.

    N tokens of this rank, K experts of each; S rows sent, M rows received, P pairs of a received row and an expert of
    this rank: M <= P <= K M.
    """

    num_tokens: int
    num_top_k: int
    num_local_experts: int
    sent_sizes: tuple[int, ...]
    """Rows for each rank, S in all."""
    received_sizes: tuple[int, ...]
    """Rows from each rank, M in all."""
    num_pairs: int
    num_all_pairs: int
    """Of all ranks together."""
    sent_tokens: torch.Tensor
    """(S,), int64: the token of each row, in the order of ranks, then tokens."""
    turns: torch.Tensor
    """(S,), int64: numbers of rows in the order in which rows of tokens are summed: the first row of every token, then
    the second ones. In one turn no token comes twice, so a sum is the same each time."""
    turn_sizes: tuple[int, ...]
    """Rows of each turn, min(R, K) of them: a token goes to no more ranks than it has experts."""
    expert_counts: torch.Tensor
    """(E/R,), int64: pairs of each expert of this rank."""
    offsets: torch.Tensor
    """(E/R,), int32: where each expert's pairs end, sorted by expert."""
    is_recompute_agreed: bool
    """All ranks have planned to recompute the dispatch in backward."""
    is_recompute_acceptable: bool
    """All would have agreed, had they planned for it."""
    needs_gradients: tuple[bool, bool]
    """Whether tokens, and weights, need gradients on any rank: then they are exchanged, on all."""

    @property
    def num_received(self) -> int:
        return sum(self.received_sizes)

    def split(self) -> tuple[Layout, tuple[torch.Tensor, torch.Tensor]]:
        """The layout without the tensors that follow the number of rows, and these, for `joined`. An autograd node that
        held them in a layout would hide them from the ledger of saved bytes."""
        nothing = self.sent_tokens.new_empty(0)
        return replace(self, sent_tokens=nothing, turns=nothing), (self.sent_tokens, self.turns)

    def joined(self, sent_tokens: torch.Tensor, turns: torch.Tensor) -> Layout:
        """The layout that was split."""
        return replace(self, sent_tokens=sent_tokens, turns=turns)

    @classmethod
    def even(cls, top_k_index: torch.Tensor, num_local_experts: int, num_ranks: int) -> Layout:
        """Of a rank that gets as many pairs as its own tokens make, in as many rows as it can send at most.

        Args:
            top_k_index: (N, K); only its shape is looked at.
        """
        num_tokens, num_top_k = top_k_index.shape
        sizes = tuple(num_tokens * (rank < num_top_k) for rank in range(num_ranks))
        return cls(
            num_tokens=num_tokens,
            num_top_k=num_top_k,
            num_local_experts=num_local_experts,
            sent_sizes=sizes,
            received_sizes=sizes,
            num_pairs=num_tokens * num_top_k,
            num_all_pairs=num_tokens * num_top_k * num_ranks,
            sent_tokens=top_k_index.new_empty(sum(sizes), dtype=torch.int64),
            turns=top_k_index.new_empty(sum(sizes), dtype=torch.int64),
            turn_sizes=tuple(size for size in sizes if size),
            expert_counts=top_k_index.new_zeros(num_local_experts, dtype=torch.int64),
            offsets=top_k_index.new_zeros(num_local_experts, dtype=torch.int32),
            is_recompute_agreed=False,
            is_recompute_acceptable=False,
            needs_gradients=(False, False),
        )

    @classmethod
    def of(cls, outgoing: Outgoing, header: torch.Tensor) -> Layout:
        """Both sides of the exchange. Waits for the device, once.

        Args:
            header: (R, E/R + 7), what every rank has told this one (`Outgoing.header`).

        Raises:
            RuntimeError: the ranks that meet here have come by different exchanges.
        """
        num_local_experts = header.size(1) - _NUM_FACTS
        expert_counts = header[:, :num_local_experts].sum(dim=0)
        goes_to = outgoing.goes_to
        num_ranks, num_tokens = goes_to.shape
        num_turns = min(num_ranks, outgoing.top_k_index.size(1))
        turns_before = goes_to.cumsum(dim=0) - 1  # (R, N): rows of the same token to ranks before
        num_rows = turns_before[-1] + 1
        turn_sizes = (num_rows > torch.arange(num_turns, device=num_rows.device).unsqueeze(1)).sum(dim=1)
        facts = torch.cat([outgoing.goes_to.sum(dim=1, dtype=torch.int64).unsqueeze(1), header[:, -_NUM_FACTS:]], dim=1)
        summary = torch.cat([facts.reshape(-1), expert_counts.sum().unsqueeze(0), turn_sizes]).tolist()
        summary, num_pairs, sizes = summary[: facts.numel()], summary[facts.numel()], summary[facts.numel() + 1 :]
        columns = (tuple(summary[column :: 1 + _NUM_FACTS]) for column in range(1 + _NUM_FACTS))
        sent, received, pairs, is_planned, is_acceptable, *needs, sequences = columns
        if len(set(sequences)) > 1:
            raise RuntimeError(
                f"the ranks have run their exchanges in different orders (sequences {list(sequences)}): what they send "
                "each other would be mixed up. Set fuse=false, and report the model."
            )
        # Room for as many rows as there can be, so that what is held of a layer does not depend on the router.
        places = torch.nonzero_static(goes_to, size=num_tokens * num_turns)
        is_row = places[:, 0] >= 0
        turn = turns_before.reshape(-1).take((places[:, 0] * num_tokens + places[:, 1]).clamp_(min=0))
        turns = torch.sort(torch.where(is_row, turn, num_turns), stable=True).indices
        return cls(
            num_tokens=outgoing.goes_to.size(1),
            num_top_k=outgoing.top_k_index.size(1),
            num_local_experts=num_local_experts,
            sent_sizes=sent,
            received_sizes=received,
            num_pairs=num_pairs,
            num_all_pairs=sum(pairs),
            sent_tokens=places[:, 1].clone(memory_format=torch.contiguous_format)[: sum(sent)],
            turns=turns[: sum(sent)],
            turn_sizes=tuple(sizes),
            expert_counts=expert_counts,
            offsets=torch.cumsum(expert_counts, dim=0, dtype=torch.int32),
            is_recompute_agreed=all(is_planned),
            is_recompute_acceptable=all(map(max, is_planned, is_acceptable)),
            needs_gradients=(any(needs[0]), any(needs[1])),
        )
