"""The grouped-matmul experts of transformers, cut into operators.

Between the router and the sum over experts lie five operators, each with a strategy of its own:

    permute      rows sorted by expert:            (N, D) -> (P, D), P = N x top-k
    up           grouped product with gate and up: (P, D) -> (P, 2I)
    activation   act(gate) * up:                   (P, 2I) -> (P, I)      the cheap one: recompute frees 2-3 tensors
    down         grouped product:                  (P, I) -> (P, D)
    unpermute    weight, restore order, sum:       (P, D) -> (N, D)

The arithmetic and its order are those of transformers' `grouped_mm`, so that losses and gradients are equal bit for
bit; the sort and the counts are routing data, computed once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flex_trainer.activations.context import current_scope
from flex_trainer.experts.grouped import GroupedProducts
from flex_trainer.experts.operators import Run
from flex_trainer.strategy import Site

_PARTS = ("permute", "up", "activation", "down", "product", "unpermute")
"""Of experts that are not cut into products, `product` is all of them."""


def part_sites(block: Site, *, is_recomputable: bool = True) -> dict[str, Site]:
    """The operators inside one experts block, by name."""
    return {
        part: Site(f"{block.name}.{part}", f"expert_{part}", block.layer, is_recomputable=is_recomputable)
        for part in _PARTS
    }


def run_in_scope(sites: Mapping[str, Site], name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run an operator in the scope of the micro-batch that is in forward; plainly where there is none."""
    scope, site = current_scope(), sites[name]
    return function(*args) if scope is None or scope.begin_unwatched(site) else scope.run(site, function, *args)


def split_experts_forward(
    experts: Any,  # a module of a class that use_experts_implementation decorates
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
    def permute(hidden_states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        rows = hidden_states[order // num_top_k]
        return rows if foreign is None else rows.masked_fill(foreign, 0.0)

    def up(rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        rows = products.up(rows, offsets, expert_ids)
        return rows if foreign is None else rows.masked_fill(foreign, 0.0)

    def down(rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        rows = products.project_down(rows, offsets, expert_ids)
        return products.norm(rows if foreign is None else rows.masked_fill(foreign, 0.0))

    def unpermute(rows: torch.Tensor, row_weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        weighted = rows * row_weights.unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=order.device)
        return weighted[inverse].view(-1, num_top_k, weighted.size(-1)).sum(dim=1).to(dtype)

    rows = run("permute", permute, hidden_states, order)
    rows = run("up", up, rows, offsets, expert_ids)
    rows = run("activation", products.activation, rows)
    rows = run("down", down, rows, offsets, expert_ids)
    return run("unpermute", unpermute, rows, row_weights, order)
