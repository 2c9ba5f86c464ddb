"""Steps under given choices, and how far their gradients are from those of others, whole or spread over ranks."""

from __future__ import annotations

import zlib

import torch
from torch.distributed.tensor import DTensor

from flex_trainer.activations.choices import Choices
from flex_trainer.config import FlexConfig
from flex_trainer.cost.shape import BatchShape
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.part import ModelPart
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import Site, Strategy

_AMPLE_LIMIT = "20GiB"
_EXACT = (Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD)


class MixedChoices:
    """One of the exact strategies for each operator, drawn by its name: the same at every call.

    Args:
        seed: another one draws others; the rank, for choices that differ between ranks.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def strategy(self, site: Site) -> Strategy:
        drawn = _EXACT[zlib.crc32(f"{self._seed}:{site.name}".encode()) % len(_EXACT)]
        return drawn if site.allows(drawn) else Strategy.KEEP


class ForcedRuntime(FlexRuntime):
    """A runtime in which the choices are given, not planned, and hold for every storage however small."""

    def __init__(self, choices: Choices, *, fuse: str | bool = False) -> None:
        super().__init__(FlexConfig(_AMPLE_LIMIT, ("recompute", "offload", "quantize"), trace=False, fuse=fuse))
        self._choices = choices

    def _begin(self, part: ModelPart, shape: BatchShape, number: int) -> MicroBatch:
        micro_batch = super()._begin(part, shape, number)
        micro_batch.choices, micro_batch.plan = self._choices, None
        micro_batch.is_bounded = True
        assert micro_batch.scope is not None
        micro_batch.scope.mitigation.min_bytes = 1
        return micro_batch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be spread over ranks, as a copy; then all of them call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; 0 where both are zero, as for an expert that got no token."""
    actual, expected = actual.double(), expected.double()
    difference, norm = float((actual - expected).norm()), float(expected.norm())
    return 0.0 if difference == 0.0 else difference / norm if norm > 0.0 else float("inf")
