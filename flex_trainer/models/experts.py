"""The grouped-matmul experts of transformers, cut into operators.

Between the router and the sum over experts lie five operators, each with a strategy of its own:

    dispatch     rows sorted by expert:            (N, D) -> (S, D), S = N x top-k
    up           grouped product with gate and up: (S, D) -> (S, 2I)
    activation   act(gate) * up:                   (S, 2I) -> (S, I)      the cheap one: recompute frees 2-3 tensors
    down         grouped product:                  (S, I) -> (S, D)
    combine      weight, restore order, sum:       (S, D) -> (N, D)

The arithmetic and its order are those of transformers' `grouped_mm`, so that losses and gradients are equal bit for
bit; the sort and the counts are routing data, computed once and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flex_trainer.experts.grouped import GroupedProducts
from flex_trainer.strategy import Site


class Run(Protocol):
    """How an operator is run: plainly, or by the scope of a micro-batch."""

    def __call__(self, site: Site, function: Callable[..., Any], *args: Any) -> Any: ...


@dataclass(frozen=True)
class ExpertSites:
    """The operators inside one experts block."""

    dispatch: Site
    up: Site
    activation: Site
    down: Site
    combine: Site

    @classmethod
    def of(cls, block: Site) -> ExpertSites:
        parts = ("dispatch", "up", "activation", "down", "combine")
        return cls(*(Site(f"{block.name}.{part}", f"expert_{part}", block.layer) for part in parts))


def split_experts_forward(
    experts: Any,  # a module of a class that use_experts_implementation decorates
    sites: ExpertSites,
    run: Run,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts' output (N, D) for `hidden_states` (N, D), `top_k_index` (N, K) and `top_k_weights` (N, K)."""
    num_experts = experts.num_experts
    products = GroupedProducts(experts)
    num_top_k = top_k_index.size(-1)
    dtype = hidden_states.dtype  # the closures below must not keep hidden_states itself alive
    # Step 1: routing data. Rows for experts of other ranks carry the id `num_experts` and sort to the end.
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    row_weights = top_k_weights.reshape(-1)[order]
    countable = expert_ids.float() if expert_ids.device.type in ("cpu", "mps") else expert_ids.int()
    counts = torch.histc(countable, bins=num_experts, min=0, max=num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    foreign = None
    if experts._is_expert_parallel:
        foreign = (expert_ids >= num_experts).unsqueeze(-1)
        expert_ids = expert_ids.clamp(max=num_experts - 1)

    # Step 2: the operators.
    # Routing data are handed to them as arguments, so that the engine knows who made it and keeps it once.
    def dispatch(hidden_states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        rows = hidden_states[order // num_top_k]
        return rows if foreign is None else rows.masked_fill(foreign, 0.0)

    def up(rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        rows = products.up(rows, offsets, expert_ids)
        return rows if foreign is None else rows.masked_fill(foreign, 0.0)

    def down(rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        rows = products.project_down(rows, offsets, expert_ids)
        return products.norm(rows if foreign is None else rows.masked_fill(foreign, 0.0))

    def combine(rows: torch.Tensor, row_weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        weighted = rows * row_weights.unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=order.device)
        return weighted[inverse].view(-1, num_top_k, weighted.size(-1)).sum(dim=1).to(dtype)

    rows = run(sites.dispatch, dispatch, hidden_states, order)
    rows = run(sites.up, up, rows, offsets, expert_ids)
    rows = run(sites.activation, products.activation, rows)
    rows = run(sites.down, down, rows, offsets, expert_ids)
    return run(sites.combine, combine, rows, row_weights, order)
