"""What a part of the model does when one of its routers has spoken."""

from __future__ import annotations

from collections.abc import Callable

from flex_trainer.experts.layout import RecomputeVote
from flex_trainer.models.routing import Routing
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.part import ModelPart
from flex_trainer.strategy import Site, Strategy


class AfterRouter:
    """The `RoutingListener` of a part.

    Args:
        part: whose plans are looked at again.
        running: the micro-batch that is in forward on this thread; None while the part runs inside the forward of
            another managed model, whose micro-batch it is.
    """

    def __init__(self, part: ModelPart, running: Callable[[], MicroBatch | None]) -> None:
        self._part = part
        self._running = running

    def recompute_vote(self, block: Site, experts: Site) -> RecomputeVote:
        """Before the counts of a layer are exchanged: whether to recompute its dispatch in backward."""
        running = self._running()
        if running is None:
            return RecomputeVote()
        is_planned = running.choices.strategy(block) is Strategy.RECOMPUTE
        # The received rows are worth fetching again only where the experts' values are given up too.
        return RecomputeVote(is_planned, is_planned or running.choices.strategy(experts) is Strategy.RECOMPUTE)

    def on_routed(self, experts: Site, routing: Routing) -> None:
        """The exact counts of this layer are known."""
        running = self._running()
        if running is not None:
            running.note_routing(experts, routing)
            self._part.revise(running, experts, routing)
