"""The activation graph of one micro-batch: what the planner plans on. Pure data, no tensors.

Most layers of a model are alike, so a graph keeps one segment for each *class* of equal layers and says which class
each layer is of. Whatever is worked out from a graph takes time by the number of classes, not of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import overload

import numpy as np

from flex_trainer.cost.load import EVEN, Load, follows
from flex_trainer.strategy import Site


@dataclass(frozen=True)
class Value:
    """One storage. Owners and savers are operator indices within the segment; -1 stands for any place outside of it."""

    owner: int
    num_bytes: int
    savers: tuple[int, ...]
    element_bytes: int = 4
    num_rows: int = 0
    """Rows that it is quantized in, each with a scale of its own; 0: it is not quantized."""
    is_routed: bool = False
    """Whether its size follows the number of rows that the layer's experts get."""
    is_decision: bool = False
    """A router has decided it: it is held also where a block around the router is recomputed."""


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
    estimated from what goes in and out (`compiled.backward_transients`)."""
    gradient_bytes: int = 0
    """Gradients of parameters that its backward leaves behind, where they do not exist yet; from a symbolic trace."""


_operator_key = attrgetter(
    "site.kind",
    "site.is_block",
    "site.is_recomputable",
    "parent",
    "inputs",
    "shared_inputs",
    "input_bytes",
    "output_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "gradient_bytes",
)
_value_key = attrgetter("owner", "num_bytes", "savers", "element_bytes", "num_rows", "is_routed", "is_decision")


@dataclass(frozen=True)
class Segment:
    """One decoder layer, or what lies outside of the layers. Operators are in the order in which they started."""

    layer: int
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]

    @property
    def shape_key(self) -> Hashable:
        """Equal for segments in which a choice has the same cost, but for names and times."""
        return self.layer < 0, tuple(map(_operator_key, self.operators)), tuple(map(_value_key, self.values))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Site names of the operators."""
        return tuple(operator.site.name for operator in self.operators)

    @functools.cached_property
    def gradient_bytes(self) -> int:
        """What the operators leave as parameter gradients."""
        return sum(operator.gradient_bytes for operator in self.operators)

    @functools.cached_property
    def is_traced(self) -> bool:
        """Whether a symbolic trace has told the transients."""
        return any(operator.backward_transient_bytes is not None for operator in self.operators)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the segments of a model stand: the same for graphs of all shapes."""

    layers: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    """Site names by segment."""

    @functools.cached_property
    def has_repeats(self) -> bool:
        """Whether some module runs twice."""
        every = [name for names in self.names for name in names]
        return len(set(every)) < len(every)


class RepeatedSegments(Sequence[Segment]):
    """Segments as one for each class, and the class of each. A segment is put together when it is asked for; its times
    are those of its class.

    Layers of the same shape do the same work, so where their measured times differ that is noise: with each layer's own
    times a plan would pick the layers that happened to be measured fast, and promise more than it gains.

    Args:
        classes: one segment for each class, with the mean of its members' times.
        class_of: the class of each segment.
        positions: layer and names of each segment.
    """

    def __init__(self, classes: tuple[Segment, ...], class_of: tuple[int, ...], positions: Positions) -> None:
        self.classes, self.class_of, self.positions = classes, class_of, positions

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> RepeatedSegments:
        """Group segments that differ in nothing but names and times."""
        members: dict[Hashable, list[Segment]] = {}
        keys = [segment.shape_key for segment in segments]
        for key, segment in zip(keys, segments, strict=True):
            members.setdefault(key, []).append(segment)
        numbers = {key: number for number, key in enumerate(members)}
        positions = Positions(
            tuple(segment.layer for segment in segments), tuple(segment.names for segment in segments)
        )
        return cls(tuple(map(_mean, members.values())), tuple(numbers[key] for key in keys), positions)

    def mapped(self, key_of: Callable[[int], Hashable], made: Callable[[Segment, int], Segment]) -> RepeatedSegments:
        """Other segments, made once for each class and key.

        Args:
            key_of: what the new segment depends on besides its class, by index.
            made: the new segment from that of the class, and the index of the first one it is made for.
        """
        numbers: dict[Hashable, int] = {}
        classes: list[Segment] = []
        class_of = []
        for index, number in enumerate(self.class_of):
            key = number, key_of(index)
            if key not in numbers:
                numbers[key] = len(classes)
                classes.append(made(self.classes[number], index))
            class_of.append(numbers[key])
        return RepeatedSegments(tuple(classes), tuple(class_of), self.positions)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Segment, ...]: ...

    def __getitem__(self, index: int | slice) -> Segment | tuple[Segment, ...]:
        return self._every[index]

    def __len__(self) -> int:
        return len(self.class_of)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (RepeatedSegments, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def _every(self) -> tuple[Segment, ...]:
        where = zip(self.class_of, self.positions.layers, self.positions.names, strict=True)
        return tuple(_moved_to(self.classes[number], layer, names) for number, layer, names in where)


def _moved_to(segment: Segment, layer: int, names: tuple[str, ...]) -> Segment:
    if segment.layer == layer and segment.names == names:
        return segment
    operators = (
        replace(operator, site=replace(operator.site, name=name, layer=layer))
        for operator, name in zip(segment.operators, names, strict=True)
    )
    return replace(segment, layer=layer, operators=tuple(operators))


def _mean(segments: list[Segment]) -> Segment:
    if len(segments) == 1:
        return segments[0]
    seconds = np.mean([[operator.seconds for operator in segment.operators] for segment in segments], axis=0)
    operators = zip(segments[0].operators, seconds.tolist(), strict=True)
    return replace(segments[0], operators=tuple(replace(operator, seconds=mean) for operator, mean in operators))


@dataclass(frozen=True)
class ActivationGraph:
    """A whole forward, cut into segments: the layers in order, then the outside (embedding, final norm, head, loss)."""

    segments: Sequence[Segment]
    shared_bytes: tuple[int, ...] = ()
    """Sizes of values made outside of the layers that nothing saves, but that a recomputation inside a layer takes (an
    attention mask, position ids): held as soon as one layer needs them, once for all layers."""

    @functools.cached_property
    def repeated(self) -> RepeatedSegments:
        """The segments by class."""
        return self.segments if isinstance(self.segments, RepeatedSegments) else RepeatedSegments.of(self.segments)

    def with_loads(self, loads: Mapping[int, Load], others: Load | None = None) -> ActivationGraph:
        """The same graph with other loads on the experts of layers: those given, by layer, and `others` on the rest."""
        layers = self.repeated.positions.layers
        by_segment = [loads.get(layer, others) or EVEN for layer in layers]
        if all(load == EVEN for load in by_segment):
            return self
        has_experts = [any(follows(op.site.kind) for op in segment.operators) for segment in self.repeated.classes]

        def key_of(index: int) -> Load:
            return by_segment[index] if has_experts[self.repeated.class_of[index]] else EVEN

        def scaled(segment: Segment, index: int) -> Segment:
            load = key_of(index)
            return segment if load == EVEN else _scale_experts(segment, load)

        return replace(self, segments=self.repeated.mapped(key_of, scaled))


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
    return with_structure_of(segment, scaled)


def with_structure_of(segment: Segment, other: Segment) -> Segment:
    """Of two segments that differ in sizes and times only, what has been worked out for the first goes to the other."""
    if "structure" in vars(segment):
        vars(other)["structure"] = vars(segment)["structure"]
    return other


def _scaled(transient_bytes: int | None, factor: float) -> int | None:
    return None if transient_bytes is None else round(transient_bytes * factor)
