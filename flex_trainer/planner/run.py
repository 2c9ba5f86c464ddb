"""What the strategies of a micro-batch that has run came to, under the load that each layer's experts got."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from flex_trainer.cost.arrays import Costs
from flex_trainer.cost.compiled import CompiledSegment
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import Load
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Timeline, gradients_on_top
from flex_trainer.planner.choice import Choice, choice_of, codes_of
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Strategy


def evaluate_run(
    graph: ActivationGraph,
    loads: Sequence[Load],
    strategies: Mapping[str, Strategy],
    rates: Rates,
    gradients: GradientBytes,
) -> Plan:
    """The plan that the strategies were, with what it is predicted to cost.

    Segments of one class with the same strategies are evaluated together, each under its own load: this is done after
    every micro-batch.

    Args:
        graph: sizes under an even load.
        loads: by segment.
        strategies: by site name (absent: keep).
    """
    segments = graph.repeated
    shares = gradients.shares(segments)
    groups: dict[tuple[int, Choice, float], list[int]] = defaultdict(list)
    for index, (number, names) in enumerate(zip(segments.class_of, segments.positions.names, strict=True)):
        groups[number, choice_of(names, strategies), shares[index]].append(index)
    num = len(segments)
    held, on_top, offloaded = np.zeros(num, np.int64), np.zeros(num, np.int64), np.zeros(num, np.int64)
    users = np.zeros(len(graph.shared_bytes), np.int64)
    added_seconds = recompute_seconds = 0.0
    made: dict[int, tuple[CompiledSegment, np.ndarray, int]] = {}
    for (number, choice, share), members in groups.items():
        segment = segments.classes[number]
        on_top_bytes = gradients_on_top(segment, share) if share else None
        compiled = CompiledSegment(segment, rates, [loads[index] for index in members], on_top_bytes)
        codes = np.repeat(codes_of([choice]), len(members), axis=0)
        costs: Costs = compiled.evaluate(codes)
        held[members], offloaded[members] = costs.held, costs.offloaded
        on_top[members] = np.ceil(costs.on_top - 1e-3)
        users[: costs.shared.shape[1]] += costs.shared.sum(axis=0)
        added_seconds += float(costs.seconds.sum())
        recompute_seconds += float(costs.recompute_seconds.sum())
        made.update({index: (compiled, codes, row) for row, index in enumerate(members)})
    timeline = Timeline.of_sizes(
        held, on_top, offloaded, users, segments, gradients, graph.shared_bytes, rates.in_flight_bytes
    )
    peak = timeline.peak()
    compiled, codes, row = made[peak.segment]
    return Plan(
        strategies={name: strategy for name, strategy in strategies.items() if strategy is not Strategy.KEEP},
        predicted_bytes=peak.held_bytes,
        peak_bytes=peak.num_bytes,
        transient_bytes=int(compiled.transient_bytes(codes)[row]),
        added_seconds=added_seconds,
        recompute_seconds=recompute_seconds,
        held_by_layer=tuple(timeline.stacked().tolist()),
    )
