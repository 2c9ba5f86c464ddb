"""What this rank's experts are expected to get, from what they got of late; and the graph once it is known."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import replace

from flex_trainer.cost.expected import EXCHANGE_BLOCK, EXPECTED, Expected, without_agreement
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import Load
from flex_trainer.micro_batch import MicroBatch
from flex_trainer.models.routing import Routing
from flex_trainer.strategy import Site, Strategy

_REMEMBERED = 8
_MUCH_LESS = 0.75


class ExpertLoads:
    """Nothing changes here for a model whose experts are all on one rank."""

    def __init__(self) -> None:
        self._recent: deque[Load] = deque(maxlen=_REMEMBERED)
        self._agreed_layers: frozenset[int] = frozenset()

    @property
    def expected(self) -> Expected:
        """Of every layer of the next micro-batch: the most that any got lately, if all ranks have as many tokens as
        this one."""
        if not self._recent:
            return EXPECTED
        load = functools.reduce(Load.union, self._recent)
        return Expected(load.rounded_up(), self._agreed_layers)

    def learn(self, micro_batch: MicroBatch) -> None:
        """A micro-batch has run."""
        if not micro_batch.loads:
            return
        # Relative to the mean rank: how long this rank's own sequences were says nothing of what it will get.
        worst = functools.reduce(Load.union, micro_batch.loads.values()).scaled(1 / micro_batch.crowd)
        self._recent.append(worst)
        self._agreed_layers = frozenset(micro_batch.would_agree_layers)


def is_unexpected(micro_batch: MicroBatch, experts: Site, routing: Routing, planned_pairs: int | None) -> bool:
    """Whether the plan of this layer's experts does not hold: more arrives than was expected, or the ranks have not
    agreed on what was planned; or, where it mitigates, whether much less will arrive.

    Args:
        planned_pairs: pairs that were planned for, where all experts are on one rank.
    """
    plan = micro_batch.plan
    assert plan is not None
    if routing.load is None:
        is_more = planned_pairs is not None and routing.num_pairs > planned_pairs
        if is_more and planned_pairs:
            factor = routing.num_pairs / planned_pairs
            micro_batch.heavier[experts.layer] = Load(factor, factor)
        return is_more
    planned = micro_batch.expected.load
    if len(micro_batch.loads) == 1:  # the first layer's counts also say how many tokens there are in all
        load = planned.scaled(routing.crowd).rounded_up()
        micro_batch.expected = replace(micro_batch.expected, load=load)
        is_much_less = load.pairs < _MUCH_LESS * planned.pairs and plan.added_seconds > 0
        if load.exceeds(planned) or is_much_less:
            return True
    if routing.load.exceeds(micro_batch.expected.load):
        return True
    block = Site(f"{experts.name}.parallel", EXCHANGE_BLOCK, experts.layer)
    return not routing.is_replay_agreed and plan.strategy(block) is Strategy.RECOMPUTE


def known_graph(micro_batch: MicroBatch, graph: ActivationGraph, layer: int) -> ActivationGraph:
    """The graph of a micro-batch whose routers have spoken up to `layer`. `graph`: at an even load."""
    if not micro_batch.loads:
        return graph.with_loads(micro_batch.heavier)
    still_expected = {other for other in micro_batch.expected.agreed_layers if other > layer}
    # A skew that one layer shows is expected of those to come.
    load = functools.reduce(Load.union, micro_batch.loads.values(), micro_batch.expected.load)
    micro_batch.expected = replace(micro_batch.expected, load=load)
    graph = graph.with_loads(micro_batch.loads, load)
    return without_agreement(graph, micro_batch.agreed_layers | still_expected)
