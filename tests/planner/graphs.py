"""Small random activation graphs, and an independent count of what a choice of strategies holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.strategy import Site, Strategy

MOVED_BYTES = 64 * 1024
ROW_ELEMENTS = 64
KINDS = ("norm", "linear", "attention_core", "expert_activation")


@st.composite
def segments(draw: st.DrawFn, layer: int) -> Segment:
    """A layer: blocks with operators inside and operators beside them; each operator takes earlier values."""
    operators: list[Operator] = []
    values: list[Value] = [Value(-1, MOVED_BYTES, (-1,))]  # what comes into the layer, held by the one before
    layer_block = open_block = 0 if draw(st.booleans()) else -1
    for index in range(draw(st.integers(1, 7))):
        if index == layer_block:
            kind, parent = "layer", -1
        else:
            kind = draw(st.sampled_from(("block", *KINDS, "router")))
            parent = layer_block if kind == "block" else draw(st.sampled_from((layer_block, open_block)))
        inputs = tuple(sorted(draw(st.sets(st.integers(0, len(values) - 1), min_size=1, max_size=2))))
        is_block = kind in ("block", "layer")
        site = Site(f"l{layer}.o{index}", kind, layer, is_block=is_block, is_recomputable=kind != "router")
        operators.append(Operator(site, parent, inputs, draw(st.integers(0, 50)) * 1e-4, MOVED_BYTES, MOVED_BYTES))
        if kind == "block":
            open_block = index
        elif kind != "layer" and draw(st.booleans()):  # it saves one of its inputs
            saved = inputs[0]
            values[saved] = _saved_by(values[saved], index)
        for _ in range(draw(st.integers(0, 2))):
            num_bytes = draw(st.integers(1, 40)) * 8192
            savers = (index,) if draw(st.booleans()) else ()
            element_bytes = draw(st.sampled_from((4, 4, 8)))
            num_rows = num_bytes // (4 * ROW_ELEMENTS) if element_bytes == 4 else 0
            is_decision = kind == "router" and draw(st.booleans())
            values.append(Value(index, num_bytes, savers, element_bytes, num_rows, is_decision=is_decision))
    return Segment(layer, tuple(operators), tuple(values))


@st.composite
def graphs(draw: st.DrawFn) -> ActivationGraph:
    return ActivationGraph(tuple(draw(segments(layer)) for layer in (*range(draw(st.integers(1, 3))), -1)))


def _saved_by(value: Value, saver: int) -> Value:
    return replace(value, savers=(*value.savers, saver))


def held_by_brute_force(segment: Segment, choice: Mapping[int, Strategy], moves_from_bytes: int) -> int:
    """Bytes held at the end of forward, by asking for each value in turn who needs it, and why."""
    operators, values = segment.operators, segment.values

    def region_of(index: int) -> int | None:
        """The outermost enclosing operator that is recomputed."""
        found = None
        while index >= 0:
            if choice.get(index) is Strategy.RECOMPUTE and operators[index].site.is_recomputable:
                found = index
            index = operators[index].parent
        return found

    def is_recomputed(region: int) -> bool:
        """Something that lies in the region is asked for in backward."""
        mine = [i for i, value in enumerate(values) if value.owner >= 0 and region_of(value.owner) == region]
        mine = [i for i in mine if not values[i].is_decision]
        if operators[region].site.kind == "layer":  # run again for what is inside only
            return any(saver >= 0 and region_of(saver) == region for i in mine for saver in values[i].savers)
        return any(values[i].savers or is_taken_by_a_recompute(i, other_than=region) for i in mine)

    def stays(number: int, region: int) -> bool:
        """Held although a block around its maker is recomputed."""
        savers = values[number].savers
        if values[number].is_decision:
            return bool(savers) or is_recomputed(region)
        is_saved_outside = any(saver < 0 or region_of(saver) != region for saver in savers)
        return operators[region].site.kind == "layer" and (
            is_saved_outside or is_taken_by_a_recompute(number, other_than=region)
        )

    def is_taken_by_a_recompute(number: int, other_than: int | None) -> bool:
        regions = {region_of(index) for index in range(len(operators))} - {None, other_than}
        return any(r is not None and number in operators[r].inputs and is_recomputed(r) for r in regions)

    total = 0
    for number, value in enumerate(values):
        region = region_of(value.owner) if value.owner >= 0 else None
        if region is not None:
            if not stays(number, region):
                continue  # dropped; comes back with the recomputation
        elif not value.savers and not is_taken_by_a_recompute(number, other_than=None):
            continue
        strategy = choice.get(value.owner, Strategy.KEEP)
        is_large = value.num_bytes >= moves_from_bytes
        if strategy is Strategy.OFFLOAD and is_large:
            continue
        if strategy is Strategy.QUANTIZE and is_large and value.element_bytes == 4:
            total += value.num_bytes // 4 + 4 * (value.num_bytes // (4 * ROW_ELEMENTS))
        else:
            total += value.num_bytes
    return total
