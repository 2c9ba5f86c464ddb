"""The cost rules once more, value by value in plain Python: what tests compare `cost/compiled.py` with.

The rules are those of the engine (activations/packing.py), applied to data instead of tensors:
- a value is governed by the operator that made it;
- a recomputed operator or block drops what it made and holds its inputs instead, if anything of it is needed at all;
- what one recomputed operator needs from another is recovered by a chain of recomputations;
- a recomputed layer holds what others need of its outputs, and any recomputed block holds what its routers decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flex_trainer.cost.graph import Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.segment_cost import (
    SegmentCost,
    backward_transients,
    ceil_bytes,
    forward_transients,
    unpaid_operators,
)
from flex_trainer.cost.uses import Uses, find_uses
from flex_trainer.strategy import Strategy


def evaluate(segment: Segment, strategies: Mapping[int, Strategy], rates: Rates) -> SegmentCost:
    """Cost of a segment; `strategies` maps operator indices to mitigations (absent: keep)."""
    uses = find_uses(segment)
    regions = _regions(segment, strategies)
    recomputes = _recomputes(segment, regions)
    outcomes = [
        _outcome(segment, index, strategies, regions, recomputes, rates) for index in range(len(segment.values))
    ]

    held_bytes = offloaded_bytes = 0
    added_seconds = recompute_seconds = _recompute_seconds(segment, recomputes, rates)
    for value, outcome in zip(segment.values, outcomes, strict=True):
        held_bytes += outcome.held_bytes
        if outcome.moved is not None:
            added_seconds += rates.moved(outcome.moved, value.num_bytes)
            offloaded_bytes += value.num_bytes if outcome.moved is Strategy.OFFLOAD else 0
    backward = _in_backward(segment, uses, outcomes, rates.transient_factor)
    forward = _in_forward(segment, uses, outcomes, rates.transient_factor)
    return SegmentCost(
        held_bytes=held_bytes,
        added_seconds=added_seconds,
        backward_bytes=backward.num_bytes,
        forward_bytes=forward.num_bytes,
        transient_bytes=max(backward, forward, key=lambda point: point.num_bytes).transient_bytes,
        offloaded_bytes=offloaded_bytes,
        recompute_seconds=recompute_seconds,
        shared=frozenset(value for region in recomputes.live for value in segment.operators[region].shared_inputs),
    )


# Step 1: which values must be there in backward, and which regions are recomputed at all


@dataclass(frozen=True)
class _Recomputes:
    needed: list[bool]
    """Values that backward, or a recomputation in it, asks for from outside of the region that makes them."""
    live: list[int]
    """Regions that are recomputed."""
    output_is_needed: set[int]
    """Regions of which a value is needed outside: their recompute runs to the end."""
    last_saver: dict[int, int]
    """By region: the last operator inside that saves what the region made."""


def _recomputes(segment: Segment, regions: list[int]) -> _Recomputes:
    needed = [False] * len(segment.values)
    last_saver: dict[int, int] = {}
    made_by: dict[int, list[int]] = {}
    decisions: dict[int, list[int]] = {}
    for index, value in enumerate(segment.values):
        region = _region_of(regions, value.owner)
        if region >= 0 and value.is_decision:
            decisions.setdefault(region, []).append(index)
            continue  # kept for the region's recomputation, whoever saves it
        made_by.setdefault(region, []).append(index)
        for saver in value.savers:
            if region >= 0 and _region_of(regions, saver) == region:
                last_saver[region] = max(last_saver.get(region, -1), saver)
            else:
                needed[index] = True
    live: list[int] = []
    output_is_needed: set[int] = set()
    # Last region first: a recomputation needs what earlier ones make.
    for region in sorted(set(regions) - {-1}, reverse=True):
        keeps_outputs = segment.operators[region].site.keeps_outputs
        if not keeps_outputs and any(needed[value] for value in made_by.get(region, ())):
            output_is_needed.add(region)
        is_live = region in last_saver or region in output_is_needed
        if is_live:
            live.append(region)
            for value in segment.operators[region].inputs:
                needed[value] = True
        for index in decisions.get(region, ()):
            needed[index] = is_live or bool(segment.values[index].savers)
    return _Recomputes(needed, live, output_is_needed, last_saver)


# Step 2: bytes and seconds


@dataclass(frozen=True)
class _Outcome:
    """What becomes of one value."""

    held_bytes: int = 0
    """Bytes of it that are held until backward."""
    moved: Strategy | None = None
    """It is offloaded or quantized."""
    region: int = -1
    """It is dropped, and this region's recompute brings it back."""


def _outcome(
    segment: Segment,
    index: int,
    strategies: Mapping[int, Strategy],
    regions: list[int],
    recomputes: _Recomputes,
    rates: Rates,
) -> _Outcome:
    value = segment.values[index]
    region = _region_of(regions, value.owner)
    is_held = value.is_decision or (
        recomputes.needed[index] and region >= 0 and segment.operators[region].site.keeps_outputs
    )
    if region >= 0 and not is_held:
        return _Outcome(region=region) if recomputes.needed[index] or value.savers else _Outcome()
    if not recomputes.needed[index]:
        return _Outcome()
    strategy = strategies.get(value.owner, Strategy.KEEP)
    if rates.moves(strategy, value):
        return _Outcome(rates.left_bytes(strategy, value), strategy)
    return _Outcome(value.num_bytes)


def _recompute_seconds(segment: Segment, recomputes: _Recomputes, rates: Rates) -> float:
    seconds = 0.0
    for region in recomputes.live:
        operator = segment.operators[region]
        forward_seconds = operator.seconds
        if operator.site.is_block and region not in recomputes.output_is_needed:
            unpaid = unpaid_operators(segment.operators, region, recomputes.last_saver[region])
            # Times are measured one by one: those inside may come out longer than the block's.
            forward_seconds -= min(sum(segment.operators[index].seconds for index in unpaid), operator.seconds)
        seconds += rates.recompute_overhead_seconds + rates.recompute_factor * forward_seconds
    return seconds


# Step 3: what comes on top while operators run


@dataclass(frozen=True)
class _Highest:
    num_bytes: int
    transient_bytes: int


def _in_backward(segment: Segment, uses: Uses, outcomes: list[_Outcome], factor: float) -> _Highest:
    """The highest point of the segment's backward."""
    there, gone = _Spans(segment), _Spans(segment)
    for index, (value, outcome) in enumerate(zip(segment.values, outcomes, strict=True)):
        first = uses.first[index]
        gone.add(0, first - 1, outcome.held_bytes)
        if outcome.region >= 0 or outcome.moved is not None:
            since = uses.recompute_at[outcome.region] if outcome.region >= 0 else uses.last[index]
            there.add(min(first, since), since, value.num_bytes)
    return _highest(backward_transients(segment), there, gone, factor)


def _in_forward(segment: Segment, uses: Uses, outcomes: list[_Outcome], factor: float) -> _Highest:
    """The highest point of the segment's forward, over the stack with all of the segment in it."""
    there, gone = _Spans(segment), _Spans(segment)
    for index, (value, outcome) in enumerate(zip(segment.values, outcomes, strict=True)):
        if value.owner < 0:
            continue
        gone.add(0, value.owner - 1, outcome.held_bytes)
        if outcome.region >= 0 or outcome.moved is not None:
            there.add(value.owner, uses.last_forward[index], value.num_bytes)
    return _highest(forward_transients(segment), there, gone, factor)


class _Spans:
    """Bytes over the operators of a segment."""

    def __init__(self, segment: Segment) -> None:
        self._steps = [0] * (len(segment.operators) + 1)

    def add(self, first: int, last: int, num_bytes: int) -> None:
        """From one operator to another, both included; none where the last comes first."""
        if first <= last:
            self._steps[first] += num_bytes
            self._steps[last + 1] -= num_bytes

    def heights(self) -> list[int]:
        return list(itertools.accumulate(self._steps[:-1]))


def _highest(transients: Sequence[int | None], there: _Spans, gone: _Spans, factor: float) -> _Highest:
    highest = _Highest(0, 0)
    for transient, back, free in zip(transients, there.heights(), gone.heights(), strict=True):
        if transient is None:
            continue
        transient_bytes = factor * (transient + back)
        if transient_bytes - free > highest.num_bytes:
            highest = _Highest(ceil_bytes(transient_bytes - free), ceil_bytes(transient_bytes))
    return highest


# Places


def _regions(segment: Segment, strategies: Mapping[int, Strategy]) -> list[int]:
    """For every operator the outermost enclosing one that is recomputed, or -1."""
    regions: list[int] = []
    for index, operator in enumerate(segment.operators):
        outer = regions[operator.parent] if operator.parent >= 0 else -1
        is_own = strategies.get(index) is Strategy.RECOMPUTE and operator.site.is_recomputable
        regions.append(outer if outer >= 0 else index if is_own else -1)
    return regions


def _region_of(regions: list[int], operator: int) -> int:
    return regions[operator] if operator >= 0 else -1
