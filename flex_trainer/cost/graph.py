"""The activation graph of one micro-batch: what the planner plans on. Pure data, no tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from flex_trainer.strategy import Site


@dataclass(frozen=True)
class Value:
    """One storage. Owners and savers are operator indices within the segment; -1 stands for any place outside of it."""

    owner: int
    num_bytes: int
    savers: tuple[int, ...]
    element_bytes: int = 4


@dataclass(frozen=True)
class Operator:
    """One run of an operator or block."""

    site: Site
    parent: int
    inputs: tuple[int, ...]
    """Values of the segment that it takes."""
    seconds: float
    output_bytes: int
    input_bytes: int
    shared_inputs: tuple[int, ...] = ()
    """Of what it takes: indices into `ActivationGraph.shared_bytes`."""
    forward_transient_bytes: int | None = None
    """Most bytes alive on top of what autograd holds while it runs forward, from a symbolic trace; None: not known,
    estimated from what goes in and out."""
    backward_transient_bytes: int | None = None
    """The same for its backward: gradients on their way and workspace, parameter gradients left out."""


@dataclass(frozen=True)
class Segment:
    """One decoder layer, or what lies outside of the layers. Operators are in the order in which they started."""

    layer: int
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]

    @property
    def shape_key(self) -> tuple[object, ...]:
        """Equal for segments that differ in nothing the planner cares about (times and names apart)."""
        return (
            tuple(
                (op.site.kind, op.site.is_replayable, op.parent, op.inputs, op.output_bytes, op.shared_inputs)
                for op in self.operators
            ),
            self.values,
        )


@dataclass(frozen=True)
class ActivationGraph:
    """A whole forward, cut into segments: the layers in order, then the outside (embedding, final norm, head, loss)."""

    segments: tuple[Segment, ...]
    shared_bytes: tuple[int, ...] = ()
    """Sizes of values made outside of the layers that nobody saves, but that a replay inside a layer takes (an
    attention mask, position ids): held as soon as one layer needs them, once for all layers."""

    def with_routed_rows(self, layer: int, factor: float) -> ActivationGraph:
        """The same graph with the values of one layer's experts `factor` times as large: another number of rows."""
        segments = (_scale_experts(segment, factor) if segment.layer == layer else segment for segment in self.segments)
        return replace(self, segments=tuple(segments))


def cut_into_segments(
    sites: list[Site],
    parents: list[int],
    inputs: list[list[int]],
    seconds: list[float],
    output_bytes: list[int],
    owners: list[int],
    value_bytes: list[int],
    savers: list[list[int]],
    element_bytes: list[int],
) -> ActivationGraph:
    """Build the graph from flat lists over calls (first five) and over values (last four)."""
    layer_of = [site.layer for site in sites]
    calls: dict[int, list[int]] = defaultdict(list)
    values: dict[int, list[int]] = defaultdict(list)
    for index, layer in enumerate(layer_of):
        calls[layer].append(index)
    for index, owner in enumerate(owners):
        values[layer_of[owner] if owner >= 0 else -1].append(index)
    shared = {
        value: number
        for number, value in enumerate(
            dict.fromkeys(
                value
                for index, taken in enumerate(inputs)
                for value in taken
                if layer_of[index] >= 0 and sites[index].is_replayable and owners[value] < 0 and not savers[value]
            )
        )
    }
    taken_abroad = _taken_abroad(sites, inputs, owners)
    segments = []
    for layer in sorted(calls.keys() | values.keys(), key=lambda layer: (layer < 0, layer)):
        local_call = {index: number for number, index in enumerate(calls[layer])}
        local_value = {index: number for number, index in enumerate(values[layer])}
        segments.append(
            Segment(
                layer,
                tuple(
                    Operator(
                        sites[index],
                        local_call.get(parents[index], -1),
                        tuple(local_value[value] for value in inputs[index] if value in local_value),
                        seconds[index],
                        output_bytes[index],
                        sum(value_bytes[value] for value in set(inputs[index])),
                        tuple(shared[value] for value in inputs[index] if value in shared and layer >= 0),
                    )
                    for index in calls[layer]
                ),
                tuple(
                    Value(
                        local_call.get(owners[index], -1),
                        value_bytes[index],
                        tuple(
                            dict.fromkeys(
                                local_call.get(saver, -1)
                                for saver in (*savers[index], *([-1] * (index in taken_abroad)))
                            )
                        ),
                        element_bytes[index],
                    )
                    for index in values[layer]
                ),
            )
        )
    return ActivationGraph(tuple(segments), tuple(value_bytes[value] for value in shared))


def _taken_abroad(sites: list[Site], inputs: list[list[int]], owners: list[int]) -> set[int]:
    """Values that an operator of one layer made and one of another takes: a replay there may need them."""
    return {
        value
        for index, taken in enumerate(inputs)
        for value in taken
        if sites[index].is_replayable and owners[value] >= 0 and sites[owners[value]].layer != sites[index].layer
    }


def _scale_experts(segment: Segment, factor: float) -> Segment:
    is_routed = [operator.site.kind.startswith("expert") for operator in segment.operators]
    return replace(
        segment,
        values=tuple(
            replace(value, num_bytes=int(value.num_bytes * factor))
            if value.owner >= 0 and is_routed[value.owner]
            else value
            for value in segment.values
        ),
        operators=tuple(
            replace(
                operator,
                seconds=operator.seconds * factor,
                output_bytes=int(operator.output_bytes * factor),
                input_bytes=int(operator.input_bytes * factor),
            )
            if is_routed[index]
            else operator
            for index, operator in enumerate(segment.operators)
        ),
    )
