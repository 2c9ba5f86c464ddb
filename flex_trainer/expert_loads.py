"""What this rank's experts are expected to get, from what they got of late; and the graph once it is known."""

from __future__ import annotations

from collections import deque

from flex_trainer.cost.expected import EXPECTED, Expected, without_agreement
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import Load
from flex_trainer.micro_batch import MicroBatch
from flex_trainer.models.routing import Routing
from flex_trainer.strategy import Site, Strategy

_REMEMBERED = 8


class ExpertLoads:
    """Nothing changes here for a model whose experts are all on one rank."""

    def __init__(self) -> None:
        self._recent: deque[Load] = deque(maxlen=_REMEMBERED)
        self._has_agreement = False

    @property
    def expected(self) -> Expected:
        """Of every layer of the next micro-batch: the most that any got lately."""
        if not self._recent:
            return EXPECTED
        load = self._recent[0]
        for other in self._recent:
            load = load.union(other)
        return Expected(load.rounded_up(), self._has_agreement)

    def learn(self, micro_batch: MicroBatch) -> None:
        """A micro-batch has run."""
        if not micro_batch.loads:
            return
        worst = Load(0.0, 0.0)
        for load in micro_batch.loads.values():
            worst = worst.union(load)
        self._recent.append(worst)
        self._has_agreement = micro_batch.would_agree


def is_unexpected(micro_batch: MicroBatch, experts: Site, routing: Routing, planned_pairs: int | None) -> bool:
    """Whether the plan of this layer's experts does not hold: more arrives than was expected, or the ranks have not
    agreed on what was planned.

    Args:
        planned_pairs: pairs that were planned for, where all experts are on one rank.
    """
    if routing.load is None:
        is_more = planned_pairs is not None and routing.num_pairs > planned_pairs
        if is_more and planned_pairs:
            factor = routing.num_pairs / planned_pairs
            micro_batch.heavier[experts.layer] = Load(factor, factor)
        return is_more
    if routing.load.exceeds(micro_batch.expected.load):
        return True
    block = Site(f"{experts.name}.parallel", "", experts.layer)
    assert micro_batch.plan is not None
    return not routing.is_replay_agreed and micro_batch.plan.strategy(block) is Strategy.RECOMPUTE


def known_graph(micro_batch: MicroBatch, graph: ActivationGraph, layer: int) -> ActivationGraph:
    """The graph of a micro-batch whose routers have spoken up to `layer`. `graph`: at an even load."""
    if not micro_batch.loads:
        return graph.with_loads(micro_batch.heavier)
    agreed = set(micro_batch.agreed_layers)
    if micro_batch.expected.has_agreement and agreed.issuperset(micro_batch.loads):
        agreed.update(segment.layer for segment in graph.segments if segment.layer > layer)
    graph = graph.with_loads(micro_batch.loads, micro_batch.expected.load)
    return without_agreement(graph, agreed)
