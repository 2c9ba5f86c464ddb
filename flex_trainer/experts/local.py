"""One rank's experts on the rows it has received: cut into operators, or as a whole.

    permute      rows by expert, once for each of its experts here: (M, D) -> (P, D)
    up, activation, down                                             (P, D)
    unpermute    weighted sum of a row's experts here:               (P, D) -> (M, D)

Weights are applied and summed here and not where the token came from, so that one row goes back for each that came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flex_trainer.compat import local_parameters
from flex_trainer.experts.grouped import GroupedProducts
from flex_trainer.experts.layout import Layout
from flex_trainer.experts.operators import Run


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one layer that are on this rank."""

    module: Any
    """The experts module, with this rank's share of the weights."""
    forward: Callable[..., torch.Tensor]
    """Its own forward, for implementations that are not cut into operators."""
    first_expert: int
    """Global id of this rank's first expert."""

    @property
    def _is_grouped(self) -> bool:
        """Whether the products are transformers' grouped ones. Classes outside of its experts interface have others."""
        config = getattr(self.module, "config", None)
        implementation = getattr(config, "_experts_implementation", None)
        return implementation == "grouped_mm" and hasattr(self.module, "has_gate")

    def run(
        self,
        layout: Layout,
        run: Run,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum, over each row's experts on this rank, of what they make of it: (M, D).

        Args:
            layout: what has been received.
            run: runs each operator.
            rows: (M, D).
            weights: (M, K).
            ids: (M, K), global ids; those of other ranks' experts are passed over.
            offsets: (E/R,), where each expert's pairs end.
        """
        permute = functools.partial(_permute, self.first_expert, layout)
        inputs, pairs = run("permute", permute, rows, weights, ids)
        if self._is_grouped:
            products = GroupedProducts(self.module)
            hidden = run("up", products.up, inputs, offsets, pairs.experts)
            hidden = run("activation", products.activation, hidden)
            outputs = run("down", products.down, hidden, offsets, pairs.experts)
        else:
            outputs = run("product", _whole_product(self.module, self.forward), inputs, pairs.experts)
        return run("unpermute", _unpermute, outputs, pairs.weights, pairs.rows, rows.size(0))


class _Pairs(NamedTuple):
    """Pairs of a row and an expert on this rank, sorted by expert: (P,) each."""

    rows: torch.Tensor
    experts: torch.Tensor
    """Numbers among this rank's experts."""
    weights: torch.Tensor


def _permute(
    first_expert: int, layout: Layout, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, _Pairs]:
    local_ids = ids.reshape(-1) - first_expert
    is_here = (local_ids >= 0) & (local_ids < layout.num_local_experts)
    # Pairs of other ranks' experts sort to the end and are cut off, by copies: nothing of the whole is kept.
    sorted_ids, order = torch.sort(torch.where(is_here, local_ids, layout.num_local_experts), stable=True)
    order = order[: layout.num_pairs].clone()
    pair_rows = order // layout.num_top_k
    # Float32 already here: what follows the number of pairs belongs to this operator, and not to `unpermute`.
    pair_weights = weights.reshape(-1).index_select(0, order).to(torch.promote_types(weights.dtype, torch.float32))
    pairs = _Pairs(pair_rows, sorted_ids[: layout.num_pairs].long(), pair_weights)
    return rows.index_select(0, pair_rows), pairs


def _unpermute(
    outputs: torch.Tensor, pair_weights: torch.Tensor, pair_rows: torch.Tensor, num_rows: int
) -> torch.Tensor:
    # Half precision is summed in float32: float32 weights make the product so.
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    weighted = outputs * pair_weights.unsqueeze(-1).to(torch.promote_types(pair_weights.dtype, dtype))
    total: torch.Tensor = _SumByRow.apply(weighted, pair_rows, num_rows)  # pyright: ignore[reportAssignmentType]
    return total.to(outputs.dtype)


class _SumByRow(torch.autograd.Function):
    """torch's own index_add keeps what it has added for backward, and needs only its shape."""

    @staticmethod
    def forward(ctx: Any, weighted: torch.Tensor, pair_rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(pair_rows)
        return weighted.new_zeros((num_rows, weighted.size(-1))).index_add_(0, pair_rows, weighted)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


def _whole_product(experts: Any, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The module's own forward with one expert of weight 1 for each row."""

    def product(inputs: torch.Tensor, pair_experts: torch.Tensor) -> torch.Tensor:
        ids = pair_experts.unsqueeze(-1)
        has_none = inputs.size(0) == 0
        if has_none:  # implementations need a row; it has no part in the result, and the weights still get gradients
            inputs, ids = inputs.new_zeros((1, inputs.size(-1))) + inputs.sum(), ids.new_zeros((1, 1))
        with local_parameters(experts):
            outputs = forward(inputs, ids, inputs.new_ones(ids.shape))
        return outputs[:0] if has_none else outputs

    return product
