"""Storages that are no activations: those of parameters and buffers, and all on other devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flex_trainer.activations.identity import is_plain, storage_key


class ReferredStorages:
    """What is only ever referred to, wherever it is saved."""

    __slots__ = ("_device", "_keys", "is_known")

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._device: torch.device | None = None
        self.is_known = False
        """Whether `find` was called."""

    def find(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look up the storages of parameters and buffers. Tensors on other devices than the first (a few numbers on the
        host, shapes on meta) are left alone too: they take no room where the activations are."""
        tensors = list(parameters)
        self._device = tensors[0].device if tensors else None
        self.add(tensors)
        self.is_known = True

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """There are more of them."""
        self._keys.update(storage_key(tensor) for tensor in tensors if is_plain(tensor))

    def has(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor and its storage belong to these."""
        return storage._cdata in self._keys or (self._device is not None and tensor.device != self._device)
