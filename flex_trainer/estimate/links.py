"""Time and buffers of what ranks send each other: a simple bandwidth model, stated where it is used.

Ranks are numbered with ep innermost, then fsdp, then replicas, then pipeline stages, and fill nodes in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb

from flex_trainer.cost.hardware import Hardware
from flex_trainer.estimate.mesh import Mesh
from flex_trainer.estimate.weights import Weight, gathered_bytes, local_bytes, whole_gradient_bytes


@dataclass(frozen=True)
class LayerLinks:
    """One layer (or the outside, -1) on one rank."""

    exchange_seconds: float = 0.0
    """All-to-all of routed rows to the experts and back, with balanced routing: in forward, and again in backward.
    Nothing hides it."""
    gather_seconds: float = 0.0
    """FSDP's all-gather of the layer's weights: once in forward, once in backward; behind computing as far as that
    takes."""
    reduce_seconds: float = 0.0
    """FSDP's reduce-scatter of its gradients."""


@dataclass(frozen=True)
class StageLinks:
    """All of a stage."""

    layers: Mapping[int, LayerLinks]
    hand_over_seconds: float
    """Hidden states to the next stage, or their gradients to the one before."""
    replicas_seconds: float
    """All-reduce of gradients over replicas, once per step."""


def stage_links(
    weights: list[Weight],
    mesh: Mesh,
    hardware: Hardware,
    routed_layers: frozenset[int],
    num_rows: int,
    row_bytes: int,
    hidden_bytes: int,
) -> StageLinks:
    """Times of everything that one rank of a stage sends.

    Args:
        weights: of the stage.
        routed_layers: layers that have experts.
        num_rows: rows that a rank sends in a layer, those to itself among them (`sent_rows`).
        row_bytes: bytes of a row: hidden size times bytes of an element.
        hidden_bytes: hidden states of a micro-batch.
    """
    node = hardware.devices_per_node
    exchange = 2 * hardware.all_to_all_seconds(num_rows * row_bytes, mesh.ep, node)
    gather = _ring_seconds_by_layer(weights, gathered_bytes, mesh, hardware)
    reduce = _ring_seconds_by_layer(weights, whole_gradient_bytes, mesh, hardware)
    layers = {
        layer: LayerLinks(exchange if layer in routed_layers else 0.0, gather[layer], reduce[layer]) for layer in gather
    }
    hand_over = 0.0
    if mesh.pp > 1:
        is_near = mesh.fsdp * mesh.dp_replicate * mesh.pp <= node
        link = hardware.node_link_bytes_per_second if is_near else hardware.network_bytes_per_second
        hand_over = hidden_bytes / (link * hardware.attainable.link)
    gradients = sum(local_bytes(weight, mesh) for weight in weights if weight.is_trainable)
    # An all-reduce is a reduce-scatter and an all-gather.
    replicas = 2 * hardware.ring_seconds(gradients, mesh.dp_replicate, max(node // mesh.fsdp, 1))
    return StageLinks(layers, hand_over, replicas)


def _ring_seconds_by_layer(
    weights: list[Weight], bytes_of: Callable[[Weight, Mesh], int], mesh: Mesh, hardware: Hardware
) -> dict[int, float]:
    """Time to gather, or to reduce, each layer's weights over the ranks that share them."""
    node = hardware.devices_per_node
    seconds: dict[int, float] = {}
    for layer in {weight.layer for weight in weights}:
        dense, routed = (
            sum(bytes_of(weight, mesh) for weight in weights if weight.layer == layer and weight.is_expert is is_expert)
            for is_expert in (False, True)
        )
        # Neighbouring ranks are an expert group, so those that share an expert are ep apart.
        seconds[layer] = hardware.ring_seconds(dense, mesh.fsdp, node)
        seconds[layer] += hardware.ring_seconds(routed, mesh.efsdp, max(node // mesh.ep, 1))
    return seconds


def sent_rows(num_tokens: int, num_chosen: int, num_experts: int, ep: int, dispatch: str) -> int:
    """Rows that a rank sends in a layer, with balanced routing.

    Args:
        num_tokens: of the rank.
        num_chosen: experts per token.
        dispatch: `flex` sends a token once to each rank that owns any of its experts; `all_to_all` once for each
            expert.
    """
    if dispatch != "flex" or not num_chosen or not num_experts:
        return num_tokens * num_chosen
    # The chance that none of a token's experts, all different, is among a rank's own.
    none = comb(num_experts - num_experts // ep, num_chosen) / comb(num_experts, num_chosen)
    return round(num_tokens * ep * (1 - none))


def exchange_bytes(num_rows: int, row_bytes: int, mesh: Mesh, factor: float, dispatch: str) -> int:
    """Buffers of one exchange that no operator's own values are: the rows that leave, and, for `all_to_all`, those that
    arrive (`factor` times as many), which are operators' values under `flex`."""
    arriving = 0.0 if dispatch == "flex" else factor
    return int((1 + arriving) * num_rows * row_bytes) if mesh.ep > 1 else 0
