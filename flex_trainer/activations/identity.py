"""Which storage is this? Addresses are reused at once, so identity needs the storage's lifetime.

A weak reference to a storage keeps its small header alive (not its data), hence as long as we hold one, no other
storage can have the same header address. That makes `(header address, weak reference)` an exact identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage header."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its storage seen through sizes and strides, and nothing more.

    Not so: subclasses such as DTensor, sparse tensors, lazy conjugates and negations (their storage holds other numbers
    than they show), and inference tensors (which count no versions).
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


class StorageTable(Generic[T]):
    """Maps storages to what is known of them, without keeping the storages alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def put(self, tensor: torch.Tensor, item: T) -> T:
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = (StorageWeakRef(storage), item)
        return item

    def sweep(self) -> None:
        """Forget storages that died: what was known of them must not keep other tensors alive."""
        dead = [key for key, (reference, _) in self._entries.items() if reference.expired()]
        for key in dead:
            del self._entries[key]

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._entries.values())


class View:
    """How a tensor lies in its storage: dtype, sizes, strides and offset."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def of(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """The same view on another storage with the same layout."""
        empty = torch.empty(0, dtype=self.dtype, device=device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class VersionWatch:
    """Notices an in-place change of a tensor without keeping its data alive.

    A detached alias shares the version counter; giving the alias other (empty) data frees the storage but not the
    counter.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        alias = tensor.detach()
        alias.data = alias.new_empty(0)
        self._alias = alias
        self._version = alias._version

    @property
    def is_changed(self) -> bool:
        return self._alias._version != self._version

    def check(self, operator: str) -> None:
        """Raise as plain autograd does when the tensor was changed after it was saved.

        Raises:
            RuntimeError: the tensor has another version now.
        """
        if self.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor saved in {operator} was at version {self._version} and is now at version"
                f" {self._alias._version}. Use the out-of-place form of the operation that changed it."
            )
