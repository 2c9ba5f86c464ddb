"""How the calls and values of a forward fall into segments: worked out once, for all shapes of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.graph import ActivationGraph, Operator, Positions, RepeatedSegments, Segment, Value
from flex_trainer.strategy import Site


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
    is_decision: bool = False


@dataclass(frozen=True)
class Sizes:
    """What changes with the shape of the batch: one entry per call, or per value."""

    seconds: np.ndarray
    output_bytes: np.ndarray
    forward_transient_bytes: np.ndarray | None
    backward_transient_bytes: np.ndarray | None
    gradient_bytes: np.ndarray
    value_bytes: np.ndarray
    value_rows: np.ndarray
    is_routed: np.ndarray


@dataclass(frozen=True)
class _Template:
    """One segment without its sizes; indices are within the segment."""

    sites: tuple[Site, ...]
    parents: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    shared_inputs: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]
    savers: tuple[tuple[int, ...], ...]
    element_bytes: tuple[int, ...]
    is_decision: tuple[bool, ...]

    @property
    def key(self) -> Hashable:
        """Equal for segments that are alike but for names and sizes."""
        sites = tuple((site.kind, site.is_block, site.is_recomputable, site.layer < 0) for site in self.sites)
        values = self.owners, self.savers, self.element_bytes, self.is_decision
        return sites, self.parents, self.inputs, self.shared_inputs, values


@dataclass(frozen=True)
class _Group:
    """Segments with equal templates; one row per segment."""

    template: _Template
    segments: list[int]
    calls: np.ndarray
    """Indices into the forward's calls."""
    values: np.ndarray


class Cut:
    """The segments of a forward; `graph` gives them sizes."""

    def __init__(self, calls: Sequence[CallNode], values: Sequence[ValueNode]) -> None:
        calls_of: dict[int, list[int]] = defaultdict(list)
        values_of: dict[int, list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            calls_of[call.site.layer].append(index)
        counted_in = _counted_in(calls, values)
        for index, layer in enumerate(counted_in):
            values_of[layer].append(index)
        self._shared = _shared(calls, values)
        taken_elsewhere = _taken_elsewhere(calls, values, counted_in)
        self._input_of = np.array([value for call in calls for value in call.inputs], dtype=np.int64)
        self._taken_by = np.array([i for i, call in enumerate(calls) for _ in call.inputs], dtype=np.int64)
        self._layers = sorted(calls_of.keys() | values_of.keys(), key=lambda layer: (layer < 0, layer))
        templates = []
        for layer in self._layers:
            local_call = {index: number for number, index in enumerate(calls_of[layer])}
            local_value = {index: number for number, index in enumerate(values_of[layer])}
            own_calls = [calls[index] for index in calls_of[layer]]
            savers = []
            for index in values_of[layer]:
                own = [local_call.get(saver, -1) for saver in values[index].savers]
                savers.append(tuple(dict.fromkeys([*own, -1] if index in taken_elsewhere else own)))
            templates.append(
                _Template(
                    sites=tuple(call.site for call in own_calls),
                    parents=tuple(local_call.get(call.parent, -1) for call in own_calls),
                    inputs=tuple(
                        tuple(local_value[value] for value in call.inputs if value in local_value) for call in own_calls
                    ),
                    shared_inputs=tuple(
                        tuple(self._shared[value] for value in call.inputs if value in self._shared and layer >= 0)
                        for call in own_calls
                    ),
                    owners=tuple(local_call.get(values[index].owner, -1) for index in values_of[layer]),
                    savers=tuple(savers),
                    element_bytes=tuple(values[index].element_bytes for index in values_of[layer]),
                    is_decision=tuple(values[index].is_decision for index in values_of[layer]),
                )
            )
        self._positions = Positions(
            tuple(self._layers), tuple(tuple(site.name for site in template.sites) for template in templates)
        )
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for number, template in enumerate(templates):
            alike[template.key].append(number)
        self._groups = [
            _Group(
                templates[numbers[0]],
                numbers,
                np.array([calls_of[self._layers[number]] for number in numbers], dtype=np.int64),
                np.array([values_of[self._layers[number]] for number in numbers], dtype=np.int64),
            )
            for numbers in alike.values()
        ]

    def graph(self, sizes: Sizes) -> ActivationGraph:
        """The activation graph of a forward with these sizes.

        Layers that differ only in what is alive while they run forward get the most that any of them has: caches that
        are filled in forward grow by a little in every layer, and would make each a class of its own. Where the stack
        is high that is right, and where it is low it does not matter.
        """
        num_calls = len(sizes.seconds)
        input_bytes = np.zeros(num_calls, dtype=np.int64)
        np.add.at(input_bytes, self._taken_by, sizes.value_bytes[self._input_of])
        class_of = [0] * len(self._layers)
        classes: list[Segment] = []
        for group in self._groups:
            calls, values = group.calls, group.values
            by_call = [sizes.output_bytes, input_bytes, sizes.gradient_bytes, sizes.backward_transient_bytes]
            parts = [array[calls] for array in by_call if array is not None]
            parts += [array[values] for array in (sizes.value_bytes, sizes.value_rows, sizes.is_routed)]
            rows = np.concatenate(parts, axis=1)
            members: dict[bytes, list[int]] = defaultdict(list)
            for row, one in enumerate(rows):
                members[one.tobytes()].append(row)
            for alike in members.values():
                for row in alike:
                    class_of[group.segments[row]] = len(classes)
                classes.append(self._segment(group, alike, sizes, input_bytes))
        # By first appearance, as `RepeatedSegments.of` has them.
        numbers = {old: new for new, old in enumerate(dict.fromkeys(class_of))}
        segments = RepeatedSegments(
            tuple(classes[old] for old in numbers), tuple(numbers[old] for old in class_of), self._positions
        )
        return ActivationGraph(segments, tuple(int(sizes.value_bytes[value]) for value in self._shared))

    def _segment(self, group: _Group, alike: list[int], sizes: Sizes, input_bytes: np.ndarray) -> Segment:
        template, first = group.template, group.calls[alike[0]]
        layer = self._positions.layers[group.segments[alike[0]]]
        names = self._positions.names[group.segments[alike[0]]]
        forward = sizes.forward_transient_bytes
        num_calls = len(first)
        operators = zip(
            template.sites,
            names,
            template.parents,
            template.inputs,
            sizes.seconds[group.calls[alike]].mean(axis=0).tolist(),
            sizes.output_bytes[first].tolist(),
            input_bytes[first].tolist(),
            template.shared_inputs,
            [None] * num_calls if forward is None else forward[group.calls[alike]].max(axis=0).tolist(),
            [None] * num_calls
            if sizes.backward_transient_bytes is None
            else sizes.backward_transient_bytes[first].tolist(),
            sizes.gradient_bytes[first].tolist(),
            strict=True,
        )
        at = group.values[alike[0]]
        stored = zip(
            template.owners,
            sizes.value_bytes[at].tolist(),
            template.savers,
            template.element_bytes,
            sizes.value_rows[at].tolist(),
            sizes.is_routed[at].tolist(),
            template.is_decision,
            strict=True,
        )
        return Segment(
            layer,
            tuple(
                Operator(Site(name, site.kind, layer, site.is_block, site.is_recomputable), *rest)
                for site, name, *rest in operators
            ),
            tuple(Value(*one) for one in stored),
        )


def _shared(calls: Sequence[CallNode], values: Sequence[ValueNode]) -> dict[int, int]:
    """Values made outside of the layers that nothing saves and an operator in a layer takes, numbered."""
    taken = (
        value
        for call in calls
        for value in call.inputs
        if call.site.layer >= 0 and call.site.is_recomputable and values[value].owner < 0 and not values[value].savers
    )
    return {value: number for number, value in enumerate(dict.fromkeys(taken))}


def _counted_in(calls: Sequence[CallNode], values: Sequence[ValueNode]) -> list[int]:
    """The layer that each value is counted in: its maker's, but where nothing saves it and only operators of one other
    layer may need it for a recomputation (the stream between two layers that save a copy of it), that other one."""
    takers: dict[int, set[int]] = defaultdict(set)
    for call in calls:
        if call.site.is_recomputable:
            for value in call.inputs:
                takers[value].add(call.site.layer)
    layers = []
    for index, value in enumerate(values):
        made_in = calls[value.owner].site.layer if value.owner >= 0 else -1
        is_for_one = value.owner >= 0 and not value.savers and len(takers[index]) == 1
        layers.append(next(iter(takers[index])) if is_for_one else made_in)
    return layers


def _taken_elsewhere(calls: Sequence[CallNode], values: Sequence[ValueNode], counted_in: Sequence[int]) -> set[int]:
    """Values that are counted in one layer and taken by an operator of another: a recomputation there may need them."""
    return {
        value
        for call in calls
        for value in call.inputs
        if call.site.is_recomputable and values[value].owner >= 0 and counted_in[value] != call.site.layer
    }
