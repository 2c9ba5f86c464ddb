"""Dispatch and combine with gradients: the gradient of each is the other."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flex_trainer.experts.layout import Layout
from flex_trainer.experts.transport import Transport


def dispatch(
    transport: Transport,
    layout: Layout,
    hidden_states: torch.Tensor,
    top_k_weights: torch.Tensor,
    ids: torch.Tensor,
    sent_tokens: torch.Tensor,
    turns: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send tokens to the ranks that own their experts.

    Args:
        hidden_states: (N, D).
        top_k_weights: (N, K).
        ids: (N, K), global expert ids.
        layout, sent_tokens, turns: a layout that was split (`Layout.split`).

    Returns:
        Rows (M, D), their weights (M, K), and their experts' global ids (M, K), int32: those of other ranks as well.
    """
    arguments = hidden_states, top_k_weights, ids, sent_tokens, turns, transport, layout
    return _Dispatch.apply(*arguments)  # pyright: ignore[reportReturnType]


def combine(
    transport: Transport, layout: Layout, rows: torch.Tensor, sent_tokens: torch.Tensor, turns: torch.Tensor
) -> torch.Tensor:
    """Send rows (M, D) back and sum those of each token: (N, D). For the layout see `dispatch`."""
    return _Combine.apply(rows, sent_tokens, turns, transport, layout)  # pyright: ignore[reportReturnType]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        top_k_weights: torch.Tensor,
        ids: torch.Tensor,
        sent_tokens: torch.Tensor,
        turns: torch.Tensor,
        transport: Transport,
        layout: Layout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.transport, ctx.layout = transport, layout
        ctx.save_for_backward(sent_tokens, turns)
        layout = layout.joined(sent_tokens, turns)
        # Weights and ids in one tensor: ids are whole numbers far below 2^24.
        routing = torch.cat([_wide(top_k_weights), ids.to(_wide(top_k_weights).dtype)], dim=1)
        rows, received = transport.dispatch(layout, [hidden_states, routing])
        weights, received_ids = received.split(top_k_weights.size(1), dim=1)
        received_ids = received_ids.to(torch.int32)
        ctx.mark_non_differentiable(received_ids)
        return rows, weights.to(top_k_weights.dtype, memory_format=torch.contiguous_format, copy=True), received_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # What needs no gradient here needs none on any rank (`Layout.needs_gradients`), so all send the same.
        needed = [number for number in (0, 1) if ctx.needs_input_grad[number]]
        layout = ctx.layout.joined(*ctx.saved_tensors)
        summed = ctx.transport.combine(layout, [gradients[number] for number in needed])
        by_input = dict(zip(needed, summed, strict=True))
        return by_input.get(0), by_input.get(1), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent_tokens: torch.Tensor,
        turns: torch.Tensor,
        transport: Transport,
        layout: Layout,
    ) -> torch.Tensor:
        ctx.transport, ctx.layout = transport, layout
        ctx.save_for_backward(sent_tokens, turns)
        return transport.combine(layout.joined(sent_tokens, turns), [rows])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout = ctx.layout.joined(*ctx.saved_tensors)
        return ctx.transport.dispatch(layout, [gradients[0]])[0], None, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
