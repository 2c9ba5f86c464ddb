"""Mitigation problems for the planner benchmark: recorded from tiny models under the real engine, and made deeper.

They are recorded anew in each run, so that sizes follow the engine as it is and times are those of this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.load import Load
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.roofline import Rates
from flex_trainer.models.discovery import discover
from flex_trainer.models.inputs import shape_of
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.planner.mitigation import MitigationPlanner
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Strategy
from flex_trainer.testing.tiny import tiny_batch, tiny_model

FAMILIES = ("deepseek_v3", "mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "llama")
SHAPES = ((2, 128), (4, 256))
_SHARES = (0.03, 0.2, 0.5, 0.8, 0.97)
"""Budgets between the minimum-memory plan (0) and keeping everything (1)."""
_IN_FLIGHT_SHARE = 0.05
_MITIGATIONS = (
    (Strategy.RECOMPUTE, Strategy.OFFLOAD),
    (Strategy.RECOMPUTE,),
    (Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE),
)


@dataclass(frozen=True)
class Problem:
    """What a planner is asked."""

    name: str
    graph: ActivationGraph
    allowed: tuple[Strategy, ...]
    rates: Rates
    available_bytes: int


def recorded(families: Iterable[str], shapes: Iterable[tuple[int, int]]) -> dict[str, ActivationGraph]:
    """Graphs of tiny models as the engine saw them; in the second shape one layer's experts get 2.6 times the rows."""
    graphs = {}
    for family in families:
        for number, (batch_size, length) in enumerate(shapes):
            graph = _record(family, batch_size, length)
            imbalance = (1.0, 2.6)[number % 2]
            if imbalance > 1:
                graph = graph.with_loads({1: Load(imbalance, imbalance)})
            graphs[f"{family} {batch_size}x{length} imbalance {imbalance}"] = _with_equal_times(graph)
    return graphs


def problems(graphs: dict[str, ActivationGraph], num_budgets: int = len(_SHARES)) -> Iterator[Problem]:
    """For each graph several budgets, with the sets of mitigations in turn."""
    for number, (name, graph) in enumerate(graphs.items()):
        for index, share in enumerate(_SHARES[-num_budgets:]):
            allowed = _MITIGATIONS[(number + index) % len(_MITIGATIONS)]
            demand_bytes = MitigationPlanner(graph, allowed, Rates()).plan(2**60).demand_peak_bytes
            rates = Rates(in_flight_bytes=int(_IN_FLIGHT_SHARE * demand_bytes))
            least_bytes = MitigationPlanner(graph, allowed, rates).plan(0).peak_bytes
            available_bytes = int(least_bytes + share * (demand_bytes - least_bytes))
            yield Problem(f"{name} share {share}", graph, allowed, rates, available_bytes)


def deeper(graph: ActivationGraph, num_layers: int, factor: int = 1) -> ActivationGraph:
    """The graph with its middle layer repeated, and all sizes and times `factor` times as large."""
    first, middle, last, outside = graph.segments[0], graph.segments[1], graph.segments[-2], graph.segments[-1]
    layers = [first, *[middle] * (num_layers - 2), last]
    segments = [_scaled(_as_layer(segment, number), factor) for number, segment in enumerate(layers)]
    shared_bytes = tuple(size * factor for size in graph.shared_bytes)
    return _with_equal_times(ActivationGraph((*segments, _scaled(outside, factor)), shared_bytes))


def _with_equal_times(graph: ActivationGraph) -> ActivationGraph:
    """The graph as it is planned: every segment with the mean times of its class."""
    return replace(graph, segments=tuple(graph.repeated))


def _record(family: str, batch_size: int, length: int) -> ActivationGraph:
    torch.manual_seed(0)
    model = tiny_model(family)
    batch = tiny_batch(model, batch_size, length)
    shape = shape_of((), batch)
    profile = Profile()
    instrumentation = Instrumentation(model, discover(model))
    try:
        for _ in range(3):  # the first times are those of cold caches; the profile forgets them
            scope = Scope(Plan({}), Ledger(), parameters=[*model.parameters(), *model.buffers()])
            with scope.open():
                output = model(**batch)
            del output
            profile.observe(shape, scope.trace, {})
    finally:
        instrumentation.remove()
    return profile.graph(shape)


def _as_layer(segment: Segment, number: int) -> Segment:
    old, new = f".{segment.layer}", f".{number}"
    return replace(
        segment,
        layer=number,
        operators=tuple(
            replace(operator, site=replace(operator.site, name=operator.site.name.replace(old, new, 1), layer=number))
            for operator in segment.operators
        ),
    )


def _scaled(segment: Segment, factor: int) -> Segment:
    return replace(
        segment,
        operators=tuple(
            replace(
                operator,
                seconds=operator.seconds * factor,
                input_bytes=operator.input_bytes * factor,
                output_bytes=operator.output_bytes * factor,
                forward_transient_bytes=_times(operator.forward_transient_bytes, factor),
                backward_transient_bytes=_times(operator.backward_transient_bytes, factor),
            )
            for operator in segment.operators
        ),
        values=tuple(replace(value, num_bytes=value.num_bytes * factor) for value in segment.values),
    )


def _times(num_bytes: int | None, factor: int) -> int | None:
    return None if num_bytes is None else num_bytes * factor
