"""What one micro-batch is on one pipeline stage: its activation graph and the seconds of every segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from flex_trainer.activations.trace import CallTrace, Work
from flex_trainer.cost.graph import ActivationGraph, Operator, Segment
from flex_trainer.cost.hardware import Hardware
from flex_trainer.cost.load import Load
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.shape import BatchShape
from flex_trainer.estimate.mesh import Stage
from flex_trainer.estimate.skeleton import Skeleton
from flex_trainer.models.discovery import ModelMap, discover
from flex_trainer.models.sharding import without_recomputed_collectives
from flex_trainer.strategy import EP_COMBINE, EP_DISPATCH
from flex_trainer.symbolic.forward import SymbolicModel


@dataclass(frozen=True)
class SegmentSeconds:
    """Computing time of a segment, links left out; `routed` parts grow with the rows that the experts get."""

    forward: float = 0.0
    routed_forward: float = 0.0
    backward: float = 0.0
    routed_backward: float = 0.0

    def forward_at(self, factor: float) -> float:
        """With `factor` times the rows."""
        return self.forward + self.routed_forward * factor

    def backward_at(self, factor: float) -> float:
        """With `factor` times the rows."""
        return self.backward + self.routed_backward * factor


@dataclass(frozen=True)
class StageGraph:
    """A stage's micro-batch with balanced routing."""

    graph: ActivationGraph
    """Layers are numbered as in the whole model."""
    seconds: tuple[SegmentSeconds, ...]
    """Of every segment."""
    routed_layers: frozenset[int]
    num_routed_pairs: int
    """(Token, expert) pairs of a layer's experts."""
    flops: float
    """Of forward and backward."""

    def with_imbalance(self, factor: float, row_share: float = 1.0) -> ActivationGraph:
        """The graph of a rank whose experts get `factor` times the mean number of tokens, in every layer.

        Args:
            row_share: rows of a balanced exchange over the most that a rank could send (see `Load.rows`).
        """
        return self.graph.with_loads(dict.fromkeys(self.routed_layers, Load(factor, factor * row_share)))


@dataclass(frozen=True)
class Precision:
    """In what the model computes."""

    autocast: torch.dtype | None
    """Type of torch's autocast; None: the weights' own."""
    matmul: str
    """Name of the type of matrix products in a hardware's figures."""


@dataclass(frozen=True)
class TracedLayer:
    """A traced layer, or what lies outside of the layers."""

    segment: Segment
    seconds: SegmentSeconds
    flops: float
    is_routed: bool
    forward_bytes: tuple[int, ...] = ()
    """By operator: alive in forward on top of what autograd holds, where layers of a kind have the most of any."""


@dataclass(frozen=True)
class TracedStage:
    """Three layers of each kind (`Skeleton.representatives`), in order, and the outside. It serves for all stages whose
    layers are of these kinds."""

    layers: tuple[TracedLayer, ...]
    outside: TracedLayer
    shared_bytes: tuple[int, ...]
    num_routed_pairs: int


def trace_stage(
    skeleton: Skeleton,
    stage: Stage,
    batch_size: int,
    sequence_length: int,
    precision: Precision,
    hardware: Hardware,
    ep: int = 1,
    dispatch: str = "flex",
    exchange_seconds: float = 0.0,
) -> TracedStage:
    """Run the traced layers of a stage forward and backward on shapes alone.

    Args:
        dispatch: how tokens reach the experts of other ranks, where ep is above 1.
        exchange_seconds: of one dispatch, or one combine, between the ranks.

    Raises:
        NotSymbolic: what the model does depends on data.
    """
    shape = BatchShape(batch_size, sequence_length)
    find = _discover_with_kept_experts if ep > 1 and dispatch != "flex" else _discover
    with skeleton.as_stage(stage, ep, dispatch):
        symbolic = SymbolicModel(skeleton.model, torch.device("cpu"), has_fused_attention=hardware.is_gpu, find=find)
        autocast = torch.autocast("cpu", precision.autocast) if precision.autocast is not None else nullcontext()
        with autocast:
            traced = symbolic.trace((), _inputs(skeleton, stage, batch_size, sequence_length))
    traced.set_seconds(lambda work: _forward_seconds(work, hardware, precision.matmul))
    _add_exchanges(traced.trace.calls, exchange_seconds)
    profile = Profile()
    profile.observe(shape, traced.trace, traced.routed_pairs)
    graph = profile.graph(shape)
    calls_of: dict[int, list[CallTrace]] = {}
    for call in traced.trace.calls:
        calls_of.setdefault(call.site.layer, []).append(call)

    def layer(segment: Segment) -> TracedLayer:
        calls = calls_of.get(segment.layer, [])
        return TracedLayer(
            segment,
            _segment_seconds(calls, hardware, precision.matmul),
            sum(call.work.flops + call.work.backward_flops for call in calls if call.work is not None),
            any(call.site.name in traced.routed_pairs for call in calls),
            tuple(call.work.forward_transient_bytes for call in calls if call.work is not None),
        )

    outside = layer(next((segment for segment in graph.segments if segment.layer < 0), Segment(-1, (), ())))
    work, seconds = traced.outside, outside.seconds
    return TracedStage(
        layers=tuple(layer(segment) for segment in graph.segments if segment.layer >= 0),
        outside=replace(
            outside,
            seconds=replace(
                seconds,
                forward=seconds.forward + _forward_seconds(work, hardware, precision.matmul),
                backward=seconds.backward + _backward_seconds(work, hardware, precision.matmul),
            ),
            flops=outside.flops + work.flops + work.backward_flops,
        ),
        shared_bytes=graph.shared_bytes,
        num_routed_pairs=max(traced.routed_pairs.values(), default=0),
    )


def _discover(model: nn.Module) -> ModelMap:
    return without_recomputed_collectives(discover(model))


def _discover_with_kept_experts(model: nn.Module) -> ModelMap:
    """Experts whose tokens come by collectives that are none of their operators are not run again in backward."""
    found = discover(model)
    experts = {one.module for one in found.experts}
    return found.with_kept(lambda one: not experts.isdisjoint(one.module.modules()))


def _add_exchanges(calls: list[CallTrace], seconds: float) -> None:
    """Add what ranks wait for each other to the times of dispatch and combine, and of the blocks around them: that is
    what running them again costs."""
    for call in calls:
        if call.site.kind in (EP_DISPATCH, EP_COMBINE):
            around: CallTrace | None = call
            while around is not None:
                around.seconds += seconds
                around = calls[around.parent] if around.parent >= 0 else None


def traced_layers(skeleton: Skeleton, stage: Stage) -> list[int]:
    """The layers of a stage that stand for the others, in order."""
    return sorted({layer for found in skeleton.representatives(stage).values() for layer in found.traced})


def _inputs(skeleton: Skeleton, stage: Stage, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch_size, sequence_length, dtype=torch.long, device="meta")
    inputs: dict[str, torch.Tensor] = {}
    if stage.has_embedding:
        inputs["input_ids"] = ids
    else:
        dtype = next(parameter.dtype for parameter in skeleton.model.parameters() if parameter.is_floating_point())
        inputs["inputs_embeds"] = torch.empty(
            batch_size, sequence_length, skeleton.hidden_size, dtype=dtype, device="meta", requires_grad=True
        )
    if stage.has_head:
        inputs["labels"] = ids
    return inputs


# Times


def _forward_seconds(work: Work | None, hardware: Hardware, dtype: str) -> float:
    return hardware.operator_seconds(work.flops, work.moved_bytes, dtype) if work is not None else 0.0


def _backward_seconds(work: Work | None, hardware: Hardware, dtype: str) -> float:
    if work is None:
        return 0.0
    return hardware.operator_seconds(work.backward_flops, work.backward_moved_bytes, dtype)


def _segment_seconds(calls: list[CallTrace], hardware: Hardware, dtype: str) -> SegmentSeconds:
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for call in calls:
        part = sums[call.site.kind.startswith("expert")]
        part[0] += _forward_seconds(call.work, hardware, dtype)
        part[1] += _backward_seconds(call.work, hardware, dtype)
    return SegmentSeconds(sums[False][0], sums[True][0], sums[False][1], sums[True][1])


# Repeating what was traced


def expand(skeleton: Skeleton, stage: Stage, traced: TracedStage) -> StageGraph:
    """All layers of a stage, each as the traced ones that stand for it."""
    place = {layer: number for number, layer in enumerate(traced_layers(skeleton, stage))}
    segments, parts, routed = [], [], set()
    left_out_bytes = 0
    for layer, found in sorted(skeleton.representatives(stage).items()):
        alike = [traced.layers[place[number]] for number in found.traced]
        # What is alive in forward may grow from layer to layer, also in those that were left out.
        growth = _growth(alike)
        num_left_out = found.num_alike - len(alike)
        segment = _with_more_alive(alike[-1].segment, [num_bytes * num_left_out for num_bytes in growth])
        segments.append(_renamed(segment, skeleton, layer))
        parts.append(alike[0])
        if found.number >= len(alike):
            left_out_bytes += growth[0]
        if parts[-1].is_routed:
            routed.add(layer)
    outside = traced.outside.segment
    segments.append(_with_more_alive(outside, [left_out_bytes] * len(outside.operators)))
    parts.append(traced.outside)
    return StageGraph(
        graph=ActivationGraph(tuple(segments), traced.shared_bytes),
        seconds=tuple(part.seconds for part in parts),
        routed_layers=frozenset(routed),
        num_routed_pairs=traced.num_routed_pairs,
        flops=sum(part.flops for part in parts),
    )


def _layer_name(segment: Segment) -> str:
    return next(operator.site.name for operator in segment.operators if operator.site.kind == "layer")


def _growth(alike: Sequence[TracedLayer]) -> list[int]:
    """Bytes by which each of a layer's operators has more alive in forward than in the layer of its kind before."""
    if len(alike) < 2:
        return [0] * len(alike[0].segment.operators)
    return [max(two - one, 0) for one, two in zip(*(layer.forward_bytes for layer in alike[-2:]), strict=True)]


def _with_more_alive(segment: Segment, more_bytes: Sequence[int]) -> Segment:
    """The segment where each operator has so much more alive in forward."""
    operators = (
        replace(operator, forward_transient_bytes=operator.forward_transient_bytes + num_bytes)
        if operator.forward_transient_bytes is not None
        else operator
        for operator, num_bytes in zip(segment.operators, more_bytes, strict=True)
    )
    return replace(segment, operators=tuple(operators))


def _renamed(segment: Segment, skeleton: Skeleton, layer: int) -> Segment:
    """The segment of one layer (which may have been traced as another of its kind) as that of `layer`."""
    old, new = _layer_name(segment), skeleton.layers[layer].site.name

    def renamed(operator: Operator) -> Operator:
        name = new + operator.site.name.removeprefix(old)
        return replace(operator, site=replace(operator.site, name=name, layer=layer))

    return replace(segment, layer=layer, operators=tuple(renamed(operator) for operator in segment.operators))


def held_by_kind(graph: ActivationGraph) -> Mapping[str, int]:
    """Saved bytes of a micro-batch that keeps everything, by the kind of operator that made them."""
    kinds: dict[str, int] = {}
    for segment in graph.segments:
        for value in segment.values:
            if value.savers:
                kind = segment.operators[value.owner].site.kind if value.owner >= 0 else "outside"
                kinds[kind] = kinds.get(kind, 0) + value.num_bytes
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
