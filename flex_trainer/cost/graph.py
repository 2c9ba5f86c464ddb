"""The activation graph of one micro-batch: what the planner plans on. Pure data, no tensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from flex_trainer.cost.load import EVEN, Load, follows
from flex_trainer.cost.uses import Uses, find_uses
from flex_trainer.strategy import Site


@dataclass(frozen=True)
class Value:
    """One storage. Owners and savers are operator indices within the segment; -1 stands for any place outside of it."""

    owner: int
    num_bytes: int
    savers: tuple[int, ...]
    element_bytes: int = 4
    num_rows: int = 0
    """Rows that it is quantised in, each with a scale of its own; 0: it is not quantised."""
    is_routed: bool = False
    """Whether its size follows the number of rows that the layer's experts get."""


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
    counted as 0."""
    backward_transient_bytes: int | None = None
    """The same for its backward: gradients on their way and workspace, parameter gradients left out; None: not known,
    estimated from what goes in and out (`evaluate.backward_transients`)."""
    gradient_bytes: int = 0
    """Gradients of parameters that its backward leaves behind, where they do not exist yet; from a symbolic trace."""


_operator_key = attrgetter(
    "site.kind",
    "site.is_block",
    "site.is_replayable",
    "parent",
    "inputs",
    "shared_inputs",
    "input_bytes",
    "output_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
)
_value_key = attrgetter("owner", "num_bytes", "savers", "element_bytes", "num_rows")


@dataclass(frozen=True)
class Segment:
    """One decoder layer, or what lies outside of the layers. Operators are in the order in which they started."""

    layer: int
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]

    @functools.cached_property
    def uses(self) -> Uses:
        """When each value is in memory."""
        return find_uses(self)

    @property
    def shape_key(self) -> object:
        """Equal for segments in which a choice has the same cost, but for names and times. Gradients of parameters
        count once they are part of the transients (`timeline.with_gradients`)."""
        return self.layer < 0, tuple(map(_operator_key, self.operators)), tuple(map(_value_key, self.values))


@dataclass(frozen=True)
class ActivationGraph:
    """A whole forward, cut into segments: the layers in order, then the outside (embedding, final norm, head, loss)."""

    segments: tuple[Segment, ...]
    shared_bytes: tuple[int, ...] = ()
    """Sizes of values made outside of the layers that nobody saves, but that a replay inside a layer takes (an
    attention mask, position ids): held as soon as one layer needs them, once for all layers."""

    def with_loads(self, loads: Mapping[int, Load], others: Load | None = None) -> ActivationGraph:
        """The same graph with other loads on the experts of layers: those given, by layer, and `others` on the rest."""
        segments = []
        for segment in self.segments:
            load = loads.get(segment.layer, others)
            segments.append(segment if load is None or load == EVEN else _scale_experts(segment, load))
        return replace(self, segments=tuple(segments))


@dataclass(frozen=True)
class CallNode:
    """One run of an operator or block in a whole forward; indices are those of the forward's calls and values."""

    site: Site
    parent: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class ValueNode:
    """One storage in a whole forward."""

    owner: int
    savers: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True)
class Sizes:
    """What changes with the shape of the batch: one entry per call, or per value."""

    seconds: Sequence[float]
    output_bytes: Sequence[int]
    forward_transient_bytes: Sequence[int | None]
    backward_transient_bytes: Sequence[int | None]
    gradient_bytes: Sequence[int]
    value_bytes: Sequence[int]
    value_rows: Sequence[int]
    is_routed: Sequence[bool]


def cut_into_segments(calls: Sequence[CallNode], values: Sequence[ValueNode], sizes: Sizes) -> ActivationGraph:
    """Build the graph of a forward."""
    calls_of: dict[int, list[int]] = defaultdict(list)
    values_of: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        calls_of[call.site.layer].append(index)
    homes = _homes(calls, values)
    for index, home in enumerate(homes):
        values_of[home].append(index)
    shared = _shared(calls, values)
    taken_abroad = _taken_abroad(calls, values, homes)
    segments = []
    for layer in sorted(calls_of.keys() | values_of.keys(), key=lambda layer: (layer < 0, layer)):
        local_call = {index: number for number, index in enumerate(calls_of[layer])}
        local_value = {index: number for number, index in enumerate(values_of[layer])}
        operators = []
        for index in calls_of[layer]:
            call = calls[index]
            operators.append(
                Operator(
                    site=call.site,
                    parent=local_call.get(call.parent, -1),
                    inputs=tuple(local_value[value] for value in call.inputs if value in local_value),
                    seconds=sizes.seconds[index],
                    output_bytes=sizes.output_bytes[index],
                    input_bytes=sum(sizes.value_bytes[value] for value in call.inputs),
                    shared_inputs=tuple(shared[value] for value in call.inputs if value in shared and layer >= 0),
                    forward_transient_bytes=sizes.forward_transient_bytes[index],
                    backward_transient_bytes=sizes.backward_transient_bytes[index],
                    gradient_bytes=sizes.gradient_bytes[index],
                )
            )
        stored = []
        for index in values_of[layer]:
            value = values[index]
            savers = [local_call.get(saver, -1) for saver in value.savers]
            stored.append(
                Value(
                    owner=local_call.get(value.owner, -1),
                    num_bytes=sizes.value_bytes[index],
                    savers=tuple(dict.fromkeys([*savers, -1] if index in taken_abroad else savers)),
                    element_bytes=value.element_bytes,
                    num_rows=sizes.value_rows[index],
                    is_routed=sizes.is_routed[index],
                )
            )
        segments.append(Segment(layer, tuple(operators), tuple(stored)))
    return ActivationGraph(tuple(segments), tuple(sizes.value_bytes[value] for value in shared))


def _shared(calls: Sequence[CallNode], values: Sequence[ValueNode]) -> dict[int, int]:
    """Values made outside of the layers that nobody saves and an operator in a layer takes, numbered."""
    taken = (
        value
        for call in calls
        for value in call.inputs
        if call.site.layer >= 0 and call.site.is_replayable and values[value].owner < 0 and not values[value].savers
    )
    return {value: number for number, value in enumerate(dict.fromkeys(taken))}


def _homes(calls: Sequence[CallNode], values: Sequence[ValueNode]) -> list[int]:
    """The layer that each value is counted in: its maker's, but where nobody saves it and only operators of one other
    layer may need it for a replay (the stream between two layers that save a copy of it), that other one."""
    takers: dict[int, set[int]] = defaultdict(set)
    for call in calls:
        if call.site.is_replayable:
            for value in call.inputs:
                takers[value].add(call.site.layer)
    homes = []
    for index, value in enumerate(values):
        made_in = calls[value.owner].site.layer if value.owner >= 0 else -1
        is_for_one = value.owner >= 0 and not value.savers and len(takers[index]) == 1
        homes.append(next(iter(takers[index])) if is_for_one else made_in)
    return homes


def _taken_abroad(calls: Sequence[CallNode], values: Sequence[ValueNode], homes: Sequence[int]) -> set[int]:
    """Values that are counted in one layer and taken by an operator of another: a replay there may need them."""
    return {
        value
        for call in calls
        for value in call.inputs
        if call.site.is_replayable and values[value].owner >= 0 and homes[value] != call.site.layer
    }


def _scale_experts(segment: Segment, load: Load) -> Segment:
    factors = [load.of(operator.site.kind) for operator in segment.operators]
    scaled = replace(
        segment,
        values=tuple(
            replace(
                value,
                num_bytes=round(value.num_bytes * factors[value.owner]),
                num_rows=round(value.num_rows * factors[value.owner]),
            )
            if value.is_routed and value.owner >= 0
            else value
            for value in segment.values
        ),
        operators=tuple(
            replace(
                operator,
                seconds=operator.seconds * factor,
                output_bytes=round(operator.output_bytes * factor),
                input_bytes=round(operator.input_bytes * factor),
                forward_transient_bytes=_scaled(operator.forward_transient_bytes, factor),
                backward_transient_bytes=_scaled(operator.backward_transient_bytes, factor),
            )
            if follows(operator.site.kind) is not None
            else operator
            for operator, factor in zip(segment.operators, factors, strict=True)
        ),
    )
    vars(scaled)["uses"] = segment.uses  # follows from who makes and saves what, whatever the sizes
    return scaled


def _scaled(transient_bytes: int | None, factor: float) -> int | None:
    return None if transient_bytes is None else round(transient_bytes * factor)
