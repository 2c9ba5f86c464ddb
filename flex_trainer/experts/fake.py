"""Experts of one rank as if all ranks' tokens were spread evenly: for runs on shapes alone, without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from flex_trainer.experts.dispatch import attach_to, run_layer
from flex_trainer.experts.handover import WaitHere, Waiting
from flex_trainer.experts.layout import Layout
from flex_trainer.experts.local import LocalExperts
from flex_trainer.experts.operators import Operators, UnmanagedOperators


class FakeEP:
    """Stands in for a FlexEP on an experts module whose tensors have shapes and no data.

    Args:
        experts: with one rank's share of the weights; its forward is replaced.
        num_ranks: ranks that share the experts.
        num_local_experts: of one rank.
    """

    def __init__(self, experts: nn.Module, num_ranks: int, num_local_experts: int) -> None:
        self.operators: Operators = UnmanagedOperators()
        self._experts = experts
        self.num_ranks = num_ranks
        self._num_local_experts = num_local_experts
        forward: Callable[..., torch.Tensor] = type(experts).forward.__get__(experts)
        self._forward = forward
        attach_to(experts, self)
        experts.forward = self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        layout = Layout.even(top_k_index, self._num_local_experts, self.num_ranks)
        run = self.operators.begin(layout)
        local = LocalExperts(self._experts, self._forward, first_expert=0)
        return run_layer(local, _FakeTransport(), layout, run, hidden_states, top_k_index, top_k_weights)


class _FakeTransport:
    """Rows of the right shapes."""

    def __init__(self) -> None:
        self.waiting: Waiting = WaitHere()

    def exchange_counts(self, header: torch.Tensor) -> torch.Tensor:
        return header

    def count_apart(self) -> None:
        pass

    def dispatch(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.new_empty((layout.num_received, *tensor.shape[1:])) for tensor in tensors]

    def combine(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.new_empty((layout.num_tokens, *tensor.shape[1:])) for tensor in tensors]
