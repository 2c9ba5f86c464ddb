"""What a choice of strategies costs in one segment: bytes held, seconds added, bytes in flight during backward.

The rules are those of the engine (activations/scope.py), applied to data instead of tensors:
- a value is governed by the operator that made it;
- a recomputed operator or block drops what it made and holds its inputs instead, if anything of it is needed at all;
- what one recomputed operator needs from another is recovered by a chain of replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flex_trainer.cost.graph import Operator, Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.strategy import Strategy

_INPUT_SAVERS = frozenset({"linear", "lm_head", "expert_up", "expert_down"})
"""Kinds that save only inputs, before they compute: a replay that stops there does not pay for them."""


@dataclass(frozen=True)
class SegmentCost:
    """One segment under one choice of strategies."""

    held_bytes: int
    """Held from forward until the segment's backward."""
    added_seconds: float
    """Time that the mitigations add to the step."""
    backward_bytes: int
    """The most needed on top of what is held, at any time in the segment's backward: recovered values and gradients."""
    forward_bytes: int
    """The most needed on top of what is held while an operator runs forward."""
    offloaded_bytes: int = 0
    """In the lower tier until backward."""
    shared: frozenset[int] = frozenset()
    """Values outside of the layers that replays here need: indices into `ActivationGraph.shared_bytes`."""


def evaluate(segment: Segment, strategies: Mapping[int, Strategy], rates: Rates) -> SegmentCost:
    """Cost of a segment; `strategies` maps operator indices to mitigations (absent: keep)."""
    operators, values = segment.operators, segment.values
    regions = _regions(segment, strategies)

    # Step 1: which values must be there in backward, and which regions are replayed at all.
    needed = [False] * len(values)
    is_live = [False] * len(operators)
    last_saver = [-1] * len(operators)
    for index, value in enumerate(values):
        owner_region = regions[value.owner] if value.owner >= 0 else -1
        for saver in value.savers:
            saver_region = regions[saver] if saver >= 0 else -1
            if saver_region >= 0 and owner_region == saver_region:
                is_live[saver_region] = True
                last_saver[saver_region] = max(last_saver[saver_region], saver)
            else:
                needed[index] = True
    made_by_region: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        if value.owner >= 0 and regions[value.owner] >= 0:
            made_by_region.setdefault(regions[value.owner], []).append(index)
    output_is_needed = [False] * len(operators)
    shared: set[int] = set()
    for index in range(len(operators) - 1, -1, -1):
        if regions[index] != index:
            continue
        output_is_needed[index] = any(needed[value] for value in made_by_region.get(index, ()))
        if is_live[index] or output_is_needed[index]:
            is_live[index] = True
            shared.update(operators[index].shared_inputs)
            for value in operators[index].inputs:
                needed[value] = True

    # Step 2: bytes and seconds.
    held_bytes = 0
    offloaded_bytes = 0
    added_seconds = 0.0
    recovered_bytes: dict[int, int] = {}
    for index, value in enumerate(values):
        region = regions[value.owner] if value.owner >= 0 else -1
        is_saved = bool(value.savers)
        if region >= 0:
            if needed[index] or is_saved:
                unit = _unit(operators, region)
                recovered_bytes[unit] = recovered_bytes.get(unit, 0) + value.num_bytes
            continue
        if not needed[index]:
            continue
        strategy = strategies.get(value.owner, Strategy.KEEP)
        if rates.moves(strategy, value.num_bytes, value.element_bytes):
            added_seconds += rates.moved(strategy, value.num_bytes)
            unit = _unit(operators, value.owner)
            recovered_bytes[unit] = recovered_bytes.get(unit, 0) + value.num_bytes
            held_bytes += rates.left_bytes(strategy, value.num_bytes, value.element_bytes)
            offloaded_bytes += value.num_bytes if strategy is Strategy.OFFLOAD else 0
        else:
            held_bytes += value.num_bytes
    for index, operator in enumerate(operators):
        if regions[index] == index and is_live[index]:
            added_seconds += rates.replay_overhead_seconds + operator.seconds
            if operator.site.is_block and not output_is_needed[index]:
                added_seconds -= _unpaid_seconds(operators, index, last_saver[index])

    # Step 3: what comes on top while operators run: the gradients of what goes in and out, and, where an operator is
    # made of several (attention as plain matrix products), the gradient of its largest internal value and a copy on
    # its way.
    internal_bytes = [0] * len(operators)
    for value in values:
        if value.owner >= 0 and value.owner in value.savers:
            internal_bytes[value.owner] = max(internal_bytes[value.owner], value.num_bytes)
    gradient_bytes: dict[int, int] = {}
    for index, operator in enumerate(operators):
        if not operator.site.is_block:
            unit = _unit(operators, index)
            around_bytes = operator.input_bytes + operator.output_bytes + 2 * internal_bytes[index]
            gradient_bytes[unit] = max(gradient_bytes.get(unit, 0), around_bytes)
    units = recovered_bytes.keys() | gradient_bytes.keys()
    return SegmentCost(
        held_bytes=held_bytes,
        added_seconds=added_seconds,
        backward_bytes=max((recovered_bytes.get(unit, 0) + gradient_bytes.get(unit, 0) for unit in units), default=0),
        forward_bytes=max((recovered_bytes.get(unit, 0) for unit in units), default=0),
        offloaded_bytes=offloaded_bytes,
        shared=frozenset(shared),
    )


def _regions(segment: Segment, strategies: Mapping[int, Strategy]) -> list[int]:
    """For every operator the outermost enclosing one that is recomputed, or -1."""
    regions: list[int] = []
    for index, operator in enumerate(segment.operators):
        outer = regions[operator.parent] if operator.parent >= 0 else -1
        is_own = strategies.get(index) is Strategy.RECOMPUTE and operator.site.is_replayable
        regions.append(outer if outer >= 0 else index if is_own else -1)
    return regions


def _unit(operators: tuple[Operator, ...], index: int) -> int:
    """The block directly inside the layer that encloses the operator: backward goes through one after the other."""
    while index >= 0:
        parent = operators[index].parent
        if parent < 0 or operators[parent].parent < 0:
            return index
        index = parent
    return index


def _unpaid_seconds(operators: tuple[Operator, ...], region: int, last_saver: int) -> float:
    """Forward time of the operators that a replay of the block never reaches."""
    return sum(
        operator.seconds
        for index, operator in enumerate(operators[region + 1 :], start=region + 1)
        if operator.parent == region
        and (index > last_saver or (index == last_saver and operator.site.kind in _INPUT_SAVERS))
    )
