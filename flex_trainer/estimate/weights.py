"""Parameters, gradients, optimizer state and gathered weights of one rank, counted shard by shard.

FSDP2 cuts the first dimension of every parameter; where it does not divide, the first ranks hold one row more, and
those are counted. Experts are first spread over ep, then cut over efsdp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.estimate.mesh import Mesh, Stage
from flex_trainer.estimate.optimizers import Optimizer

_GATHERED_UNITS = 2
"""The running layer and the one that is fetched ahead."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the whole model."""

    shape: tuple[int, ...]
    element_bytes: int
    is_expert: bool
    is_trainable: bool
    layer: int
    """-1: outside of the layers."""
    is_embedding: bool = False
    is_head: bool = False
    """Final norm and output head; with tied weights the embedding is both."""
    compute_element_bytes: int | None = None
    """Of an element where the weight is gathered to compute with (FSDP's mixed precision); None: as it is kept."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True)
class RankWeights:
    """What one rank of a stage holds, in bytes."""

    parameters_bytes: int
    gradients_bytes: int
    """From the first backward to the optimizer step."""
    are_gradients_sharded: bool
    optimizer_bytes: int
    gathered_bytes: int
    """Whole weights of the layers that run, and of the head from its forward to its backward."""
    buckets_bytes: int
    """Copies of the gradients for their all-reduce (data parallelism without sharding)."""
    step_bytes: int
    """Temporary tensors of the optimizer step."""
    gradients: GradientBytes
    """Gradients at the start of a micro-batch, per layer."""
    reduction_bytes: Mapping[int, int]
    """Per layer: what its backward needs beside the gradient that is being computed, for the reduction of whole
    gradients to shards."""
    num_parameters: int
    """Elements held by this rank."""

    @property
    def constant_bytes(self) -> int:
        """Held during all micro-batches, gradients left out."""
        return self.parameters_bytes + self.optimizer_bytes + self.gathered_bytes + self.buckets_bytes


def of_stage(weights: Iterable[Weight], stage: Stage) -> list[Weight]:
    """Those that a stage holds. A tied embedding is on the first and on the last."""
    layers = set(stage.layers)
    return [
        weight
        for weight in weights
        if weight.layer in layers
        or (weight.layer < 0 and weight.is_embedding and stage.has_embedding)
        or (weight.layer < 0 and (weight.is_head or not weight.is_embedding) and stage.has_head)
    ]


def local_shape(weight: Weight, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the largest shard of a weight on a rank."""
    whole, num_shards = gathered_shape(weight, mesh), _num_shards(weight, mesh)
    return (-(-whole[0] // num_shards), *whole[1:]) if whole else whole


def gathered_shape(weight: Weight, mesh: Mesh) -> tuple[int, ...]:
    """Shape of a weight while its layer runs: whole, or all of the rank's own experts."""
    return (weight.shape[0] // mesh.ep, *weight.shape[1:]) if weight.is_expert else weight.shape


def _num_shards(weight: Weight, mesh: Mesh) -> int:
    return mesh.efsdp if weight.is_expert else mesh.fsdp


def gathered_bytes(weight: Weight, mesh: Mesh) -> int:
    """While its layer runs, in the type in which that computes; its gradient in backward is as large."""
    element_bytes = weight.compute_element_bytes or weight.element_bytes
    return prod(gathered_shape(weight, mesh)) * element_bytes


def whole_gradient_bytes(weight: Weight, mesh: Mesh) -> int:
    """A whole gradient that waits, or is on its way to the shards: in the type of the weights that are kept."""
    return prod(gathered_shape(weight, mesh)) * weight.element_bytes


def local_bytes(weight: Weight, mesh: Mesh) -> int:
    return prod(local_shape(weight, mesh)) * weight.element_bytes


def rank_weights(weights: list[Weight], mesh: Mesh, optim: Optimizer, num_micro_batches: int) -> RankWeights:
    """What a rank holds of a stage's weights (`of_stage`).

    With accumulation the reduction of gradients waits for the last micro-batch, and until then they are whole
    (`set_requires_gradient_sync(False)`); with replicas (HSDP) they are sharded after every backward, since only the
    all-reduce waits. That is what transformers' Trainer does.
    """
    trainable = [weight for weight in weights if weight.is_trainable]
    is_sharded = mesh.fsdp == 1 or num_micro_batches == 1 or mesh.dp_replicate > 1
    size_of = local_bytes if is_sharded else whole_gradient_bytes
    gradients_bytes = sum(size_of(weight, mesh) for weight in trainable)
    has_buckets = mesh.fsdp == 1 and mesh.dp_replicate > 1
    return RankWeights(
        parameters_bytes=sum(local_bytes(weight, mesh) for weight in weights),
        gradients_bytes=gradients_bytes,
        are_gradients_sharded=is_sharded,
        optimizer_bytes=sum(optim.state_bytes(local_shape(weight, mesh), weight.element_bytes) for weight in trainable),
        gathered_bytes=_gathered(weights, mesh),
        buckets_bytes=gradients_bytes if has_buckets else 0,
        step_bytes=optim.copies_in_step * sum(local_bytes(weight, mesh) for weight in trainable),
        gradients=_gradients(trainable, mesh, num_micro_batches),
        reduction_bytes=_reduction(trainable, mesh, is_sharded),
        num_parameters=sum(prod(local_shape(weight, mesh)) for weight in weights),
    )


def _gathered(weights: list[Weight], mesh: Mesh) -> int:
    by_layer: dict[int, int] = defaultdict(int)
    for weight in weights:
        if _num_shards(weight, mesh) > 1:
            # Norm and head stay whole until their backward; the embedding is given back before the first layer.
            if weight.layer >= 0 or weight.is_head:
                by_layer[weight.layer] += gathered_bytes(weight, mesh)
    head_bytes = by_layer.pop(-1, 0)
    return head_bytes + sum(sorted(by_layer.values())[-_GATHERED_UNITS:])


def _gradients(trainable: list[Weight], mesh: Mesh, num_micro_batches: int) -> GradientBytes:
    """Of a single micro-batch all gradients are still to come; of several, those of the first are there."""
    pending: dict[int, int] = defaultdict(int)
    largest: dict[int, int] = defaultdict(int)
    for weight in trainable:
        if num_micro_batches == 1:
            pending[weight.layer] += local_bytes(weight, mesh)
        else:
            largest[weight.layer] = max(largest[weight.layer], gathered_bytes(weight, mesh))
    return GradientBytes(dict(pending), dict(largest))


def _reduction(trainable: list[Weight], mesh: Mesh, is_sharded: bool) -> dict[int, int]:
    """A layer's gradients are whole until its backward ends, and once more in the buffer in which they are sent; where
    they wait whole in any case, only that buffer counts. The largest is left out: it is in the transients of the
    operator that computes it."""
    whole: dict[int, int] = defaultdict(int)
    buffers: dict[int, int] = defaultdict(int)
    largest: dict[int, int] = defaultdict(int)
    for weight in trainable:
        # The embedding's gradient comes when all activations are gone.
        is_late = weight.layer < 0 and weight.is_embedding and not weight.is_head
        if _num_shards(weight, mesh) > 1 and not is_late:
            num_bytes = gathered_bytes(weight, mesh)
            whole[weight.layer] += num_bytes if is_sharded else 0
            buffers[weight.layer] += whole_gradient_bytes(weight, mesh)
            largest[weight.layer] = max(largest[weight.layer], num_bytes)
    return {layer: whole[layer] + num_bytes - largest[layer] for layer, num_bytes in buffers.items()}
