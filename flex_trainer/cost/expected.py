"""What is assumed of the other ranks when a micro-batch is planned, before their tokens arrive."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.load import EVEN, Load
from flex_trainer.strategy import EP_BLOCK, Site


def ep_block(experts: Site) -> Site:
    """The block that is dispatch and experts, recomputed only where all ranks agree.

    Args:
        experts: the experts inside.
    """
    return Site(
        f"{experts.name}.ep_block", EP_BLOCK, experts.layer, is_block=True, is_recomputable=experts.is_recomputable
    )


@dataclass(frozen=True)
class Expected:
    """What a micro-batch is planned with."""

    load: Load = EVEN
    """Of every layer."""
    agreed_layers: frozenset[int] = frozenset()
    """Layers in which all ranks are going to agree on recomputing the dispatch."""

    def graph(self, graph: ActivationGraph) -> ActivationGraph:
        """The graph as it is going to be; `graph`: at an even load."""
        return without_agreement(graph.with_loads({}, self.load), self.agreed_layers)


EXPECTED = Expected()
NOTHING_COMES = Expected(Load(0.0, 0.0))
"""All tokens go to experts of other ranks: the least that may come."""


def without_agreement(graph: ActivationGraph, agreed_layers: Collection[int]) -> ActivationGraph:
    """The graph where dispatches are recomputed in no layer but those of `agreed_layers`."""
    segments = graph.repeated
    if not any(operator.site.kind == EP_BLOCK for segment in segments.classes for operator in segment.operators):
        return graph
    layers = segments.positions.layers
    return replace(
        graph,
        segments=segments.mapped(
            lambda index: layers[index] in agreed_layers,
            lambda segment, index: segment if layers[index] in agreed_layers else _without_recomputed_exchange(segment),
        ),
    )


def _without_recomputed_exchange(segment: Segment) -> Segment:
    operators = (
        replace(operator, site=replace(operator.site, is_recomputable=False))
        if operator.site.kind == EP_BLOCK
        else operator
        for operator in segment.operators
    )
    return replace(segment, operators=tuple(operators))
