"""FlexEP: how the experts of a layer get their tokens under `DistributedConfig(ep_implementation="flex")`.

    router's choice -> counts to all ranks -> layout
        dispatch    each token once to each rank that owns any of its experts
        experts     this rank's experts on all it has received, weighted and summed per row
        combine     one row back for each that came; the sender sums them

transformers' own `all_to_all` sends a copy of the token for each of its experts, both ways and in backward again.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from flex_trainer.experts.autograd import combine, dispatch
from flex_trainer.experts.layout import Layout, Outgoing
from flex_trainer.experts.local import LocalExperts
from flex_trainer.experts.operators import Operators, Run, UnmanagedOperators
from flex_trainer.experts.transport import AllToAll, Transport

_ATTRIBUTE = "_flex_ep"


class FlexEP(EPImplementation):
    """Dispatch, local experts and combine of one experts module. transformers makes one for each.

    The ranks of a tensor-parallel group hold the same tokens: each sends its share of them, and the results are
    gathered.
    """

    num_local_experts: int

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.operators: Operators = UnmanagedOperators()
        """Runs this layer's operators; an attached runtime puts its own here."""
        self.transport: Transport = AllToAll(ep_mesh.get_group())
        self._experts = experts
        self.num_ranks: int = ep_mesh.size()
        self._first_expert: int = ep_mesh.get_local_rank() * self.num_local_experts
        attach_to(experts, self)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted output of the experts (N, D) for tokens (N, D), global expert ids and weights (N, K)."""
        if self.tp_mesh.size() == 1:
            return self._run(hidden_states, top_k_index, top_k_weights)
        shares = [self._share(tensor) for tensor in (hidden_states, top_k_index, top_k_weights)]
        return self._gathered(self._run(*shares), hidden_states)

    def _run(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        outgoing = Outgoing.of(top_k_index, self.num_local_experts, self.num_ranks)
        needs = hidden_states.requires_grad, top_k_weights.requires_grad
        header = outgoing.header(self.operators.recompute_vote(), needs, self.transport.waiting.sequence())
        layout = Layout.of(outgoing, self.transport.exchange_counts(header))
        # Ranks may differ in what needs gradients (only one has images, say), but all must exchange the same ones.
        hidden_states, top_k_weights = (
            tensor if not is_needed or tensor.requires_grad else tensor.detach().requires_grad_()
            for tensor, is_needed in zip((hidden_states, top_k_weights), layout.needs_gradients, strict=True)
        )
        run = self.operators.begin(layout)
        local = LocalExperts(self._experts, self.experts_forward, self._first_expert)
        return run_layer(local, self.transport, layout, run, hidden_states, top_k_index, top_k_weights)

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of the rows that its tensor-parallel group holds."""
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _gathered(self, output: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """All rows from the shares of the group."""
        shape, stride = like.shape, (like.shape[1], 1)
        shares = DTensor.from_local(output.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride)
        return shares.full_tensor()


def run_layer(
    local: LocalExperts,
    transport: Transport,
    layout: Layout,
    run: Run,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Everything of a layer's experts that comes after the exchange of counts. See FlexEP."""
    sizes, numbers = layout.split()
    local_experts = functools.partial(local.run, sizes, run)

    def ep_block(
        hidden_states: torch.Tensor,
        top_k_weights: torch.Tensor,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        *numbers: torch.Tensor,
    ) -> torch.Tensor:
        send = functools.partial(dispatch, transport, sizes)
        received = run("dispatch", send, hidden_states, top_k_weights, ids, *numbers)
        return run("experts", local_experts, *received, offsets)

    # Routing data are handed on as arguments, so that the engine knows that they were made before.
    rows = run("ep_block", ep_block, hidden_states, top_k_weights, top_k_index, layout.offsets, *numbers)
    return run("combine", functools.partial(combine, transport, sizes), rows, *numbers)


class Dispatcher(Protocol):
    """How an experts module gets its tokens: a FlexEP, or what stands in for one."""

    operators: Operators
    num_ranks: int


def attach_to(experts: nn.Module, dispatcher: Dispatcher) -> None:
    """Have `dispatcher_of` find it."""
    vars(experts)[_ATTRIBUTE] = dispatcher


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """How a module's tokens come to it; None where its experts are all here, or get their tokens in another way."""
    return vars(module).get(_ATTRIBUTE)
