"""Which storage is this? Addresses are reused at once, so identity needs the storage's lifetime.

A weak reference to a storage keeps its small header alive (not its data), hence as long as we hold one, no other
storage can have the same header address. That makes `(header address, weak reference)` an exact identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
_STRIDED = torch.strided


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage header."""
    return tensor.untyped_storage()._cdata


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its storage seen through sizes and strides, and nothing more.

    Not so: subclasses such as DTensor, sparse tensors, lazy conjugates and negations (their storage holds other numbers
    than they show), and inference tensors (which count no versions).
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is _STRIDED
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's part of a parameter, without a gradient of its own."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class StorageTable(Generic[T]):
    """Maps storages to what is known of them, without keeping the storages alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}
        self._watched: dict[int, None] = {}  # what a sweep looks at

    def get(self, storage: torch.UntypedStorage) -> T | None:
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry[1]

    def put(self, storage: torch.UntypedStorage, item: T) -> T:
        key = storage._cdata
        self._entries[key] = (StorageWeakRef(storage), item)
        self._watched[key] = None
        return item

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Have sweeps look at this storage again: what is known of it keeps tensors alive now."""
        self._watched[storage._cdata] = None

    def sweep(self, is_light: Callable[[T], bool]) -> None:
        """Forget storages that died: what was known of them must not keep other tensors alive.

        Survivors of which only what `is_light` is known keep nothing alive, so they need not be looked at again: a
        model's last layer would otherwise pay for the storages of all layers before it.
        """
        watched: dict[int, None] = {}
        for key in self._watched:
            reference, item = self._entries[key]
            if reference.expired():
                del self._entries[key]
            elif not is_light(item):
                watched[key] = None
        self._watched = watched

    def clear(self) -> None:
        self._entries.clear()
        self._watched.clear()

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


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _empty(like: torch.Tensor) -> torch.Tensor:
    """A tensor without elements, of the same kind; one for all where nothing else is special about it."""
    if type(like) is not torch.Tensor:
        return like.new_empty(0)
    key = like.dtype, like.device
    found = _EMPTY.get(key)
    if found is None:
        found = like.new_empty(0)
        if type(found) is torch.Tensor and not found.is_inference():
            _EMPTY[key] = found
    return found


class VersionWatch:
    """Notices an in-place change of a tensor without keeping its data alive.

    A detached alias shares the version counter; giving the alias other (empty) data frees the storage but not the
    counter.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        alias = tensor.detach()
        alias.data = _empty(alias)
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
