"""Fused attention, as a GPU runs it, for traces made on a machine without one.

On a CPU, torch's attention falls back to plain matrix products where queries and values differ in size or a mask is
given, and then holds a length x length matrix per head. The kernels on a GPU do not: they hold their inputs, the
output, and one float per query and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flex_trainer.activations.trace import Work


class FusedAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by a stand-in with the saved tensors of a fused kernel."""

    def __init__(self, work: Callable[[], Work]) -> None:
        """`work`: of the operator that is running now, forward or backward."""
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return _Kernel.apply(
            given["query"], given["key"], given["value"], given.get("attn_mask"), bool(given.get("is_causal")), self
        )

    def note_forward(self, flops: float) -> None:
        self._work().flops += flops

    def note_backward(self, flops: float) -> None:
        self._work().backward_flops += flops


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, is_causal: bool, owner: FusedAttention) -> Any:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, log_sum_exp)
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        ctx.flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal or mask is not None else 1.0)
        ctx.owner = owner
        owner.note_forward(ctx.flops)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _, _ = ctx.saved_tensors
        # Both products of forward again, and the gradients of queries, keys, values.
        ctx.owner.note_backward(2.5 * ctx.flops)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None
