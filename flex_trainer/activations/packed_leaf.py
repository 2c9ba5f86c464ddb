"""Arguments and results with tensors in packed form: what a recomputation is given again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flex_trainer.activations.leaves import mapped
from flex_trainer.activations.values import Packed, PackedOutput

if TYPE_CHECKING:
    from flex_trainer.activations.region import Region


class PackedLeaf:
    """A tensor argument of a region, with what is needed to hand it to the recomputation."""

    __slots__ = ("_packed", "_parameter", "_requires_grad")

    def __init__(self, tensor: torch.Tensor, pack_input: Callable[[torch.Tensor], Packed]) -> None:
        self._packed = pack_input(tensor)
        self._parameter = tensor if type(tensor) is nn.Parameter else None
        self._requires_grad = tensor.requires_grad

    @property
    def region(self) -> Region | None:
        """The region that has to be recomputed to recover it; None where none has."""
        slot = self._packed.slot if type(self._packed) is PackedOutput else None
        return None if slot is None or slot.value is not None else slot.region

    def recover(self) -> torch.Tensor:
        tensor = self._packed.get()
        # A parameter is handed on as the very object: the operator may look for attributes on it.
        return tensor.detach().requires_grad_(self._requires_grad) if self._parameter is None else self._parameter


def recovered(tree: Any) -> Any:
    """An argument with its tensors in the place of their packed forms."""
    if type(tree) is PackedLeaf:
        return tree.recover()
    return mapped(lambda leaf: leaf.recover() if type(leaf) is PackedLeaf else leaf, tree)
