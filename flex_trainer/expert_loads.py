"""What this rank's experts are expected to get, from what they got of late; and the graph once it is known."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import replace

from flex_trainer.cost.expected import EXPECTED, Expected, exchange_block, without_agreement
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import Load, few_of
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
        if not micro_batch.loads or micro_batch.crowd == 0:
            return
        # Relative to the mean rank: how long this rank's own sequences were says nothing of what it will get.
        worst = functools.reduce(Load.union, micro_batch.loads.values()).scaled(1 / micro_batch.crowd)
        self._recent.append(worst)
        self._agreed_layers = frozenset(micro_batch.would_agree_layers)


def take_in(micro_batch: MicroBatch, experts: Site, routing: Routing, planned_pairs: int | None) -> bool:
    """Note what a layer's routing says of this layer and of those to come; whether the plan has to be made anew: more
    arrives than was expected, the ranks have not agreed on what was planned, or, where the plan mitigates, much less
    will arrive.

    Args:
        planned_pairs: pairs that were planned for, where all experts are on one rank.
    """
    plan, expected = micro_batch.plan, micro_batch.expected
    assert plan is not None
    if routing.load is None:
        is_more = planned_pairs is not None and routing.num_pairs > planned_pairs
        if is_more and planned_pairs:
            factor = routing.num_pairs / planned_pairs
            micro_batch.heavier[experts.layer] = Load(factor, factor)
        return is_more
    is_over = False
    if not micro_batch.is_crowd_known:  # the first counts also say how many tokens there are in all
        micro_batch.is_crowd_known = True
        load = expected.load.scaled(routing.crowd).rounded_up()
        is_much_less = load.pairs < _MUCH_LESS * expected.load.pairs and plan.added_seconds > 0
        is_over = load.exceeds(expected.load) or is_much_less
        if is_over:
            expected = replace(expected, load=load)
    if routing.load.exceeds(expected.load):
        is_over = True
        # A skew that one layer shows is expected of those to come.
        expected = replace(expected, load=expected.load.union(routing.load))
    micro_batch.expected = expected
    is_refused = not routing.is_replay_agreed and plan.strategy(exchange_block(experts)) is Strategy.RECOMPUTE
    return is_over or is_refused


def known_graph(micro_batch: MicroBatch, graph: ActivationGraph, layer: int | None = None) -> ActivationGraph:
    """The graph of a micro-batch whose routers have spoken up to `layer`, or all of them. `graph`: at an even load."""
    if not micro_batch.loads:
        return graph.with_loads(micro_batch.heavier)
    expected = micro_batch.expected
    still_expected = {other for other in expected.agreed_layers if layer is not None and other > layer}
    graph = graph.with_loads(few_of(micro_batch.loads), expected.load)
    return without_agreement(graph, micro_batch.agreed_layers | still_expected)
