"""The engine between the operators of experts that are spread over ranks."""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import nn

from flex_trainer.activations.context import managing_scope
from flex_trainer.cost.expected import ep_block
from flex_trainer.experts.layout import Layout, RecomputeVote
from flex_trainer.experts.operators import Run
from flex_trainer.models.experts import part_sites, run_in_scope
from flex_trainer.models.routing import Routing, RoutingListener
from flex_trainer.strategy import EP_COMBINE, EP_DISPATCH, Site


class ManagedOperators:
    """Runs each operator of one layer's experts in the scope of the micro-batch that is in forward.

    Args:
        module: the experts module.
        experts: its site.
        listener: hears of the counts.
    """

    def __init__(self, module: nn.Module, experts: Site, listener: RoutingListener) -> None:
        self._listener = listener
        # What a recomputation cannot take back: writes into buffers.
        is_recomputable = experts.is_recomputable and not any(True for _ in module.buffers())
        self._experts = replace(experts, is_recomputable=is_recomputable)
        self._block = ep_block(self._experts)
        # A collective by itself is never recomputed: no rank can know what the others do with theirs.
        self._sites = {
            "ep_block": self._block,
            "dispatch": Site(f"{experts.name}.dispatch", EP_DISPATCH, experts.layer, is_recomputable=False),
            "experts": self._experts,
            "combine": Site(f"{experts.name}.combine", EP_COMBINE, experts.layer, is_recomputable=False),
        }
        self._sites |= part_sites(experts, is_recomputable=is_recomputable)

    def recompute_vote(self) -> RecomputeVote:
        return (
            RecomputeVote() if managing_scope() is None else self._listener.recompute_vote(self._block, self._experts)
        )

    def begin(self, layout: Layout) -> Run:
        if managing_scope() is not None:
            self._listener.on_routed(self._experts, Routing.exchanged(layout))
        return functools.partial(run_in_scope, self._sites)
