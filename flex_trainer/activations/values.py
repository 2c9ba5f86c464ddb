"""What autograd holds in place of a saved tensor.

The lifetime of everything here belongs to the autograd graph: a packed value dies with the node that saved it, and
takes along whatever only it kept alive. Nothing points back at autograd nodes, so there are no reference cycles.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from flex_trainer.activations.identity import VersionWatch, View
from flex_trainer.activations.known import KnownHolding
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.parameters import for_backward

if TYPE_CHECKING:
    from flex_trainer.activations.region import Region


class Packed(Protocol):
    """A saved tensor in some form."""

    name: str
    """The operator it belongs to, for messages."""

    def get(self) -> torch.Tensor:
        """The tensor, bit for bit (quantized values: within their stated error)."""
        ...


class Holding:
    """Accounts for one storage that is held on the device: alive as long as any packed value shares it."""

    __slots__ = ("__weakref__", "_ledger", "num_bytes")

    def __init__(self, ledger: Ledger, num_bytes: int) -> None:
        self._ledger = ledger
        self.num_bytes = num_bytes
        ledger.hold(num_bytes)

    def __del__(self) -> None:
        self._ledger.release(self.num_bytes)


class PackedReference:
    """A parameter, a buffer, or a tensor of a kind the engine leaves alone: the very object, read late.

    Under FSDP2 the storage of an unsharded parameter is empty between forward and the next gather; the same tensor is
    full again when backward asks for it.
    """

    __slots__ = ("name", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self.name = name

    def get(self) -> torch.Tensor:
        if self._version is not None:
            _check_version(self._tensor, self._version, self.name)
        return for_backward(self._tensor) if type(self._tensor) is torch.nn.Parameter else self._tensor


class PackedKept:
    """An activation that stays where it is."""

    __slots__ = ("_holding", "name", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, holding: Holding | KnownHolding, name: str) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._holding = holding
        self.name = name

    def get(self) -> torch.Tensor:
        _check_version(self._tensor, self._version, self.name)
        return self._tensor


class Recovered:
    """Accounts for one storage that a recomputation has brought back: alive as long as any slot shares it."""

    __slots__ = ("_ledger", "_num_bytes")

    def __init__(self, ledger: Ledger, num_bytes: int) -> None:
        self._ledger = ledger
        self._num_bytes = num_bytes
        ledger.recover(num_bytes)

    def __del__(self) -> None:
        self._ledger.recover(-self._num_bytes)


class Slot:
    """One value of a recomputed region: empty until the region is recomputed, then full until it is no longer
    needed."""

    __slots__ = ("__weakref__", "_ledger", "_recovered", "region", "value")

    def __init__(self, region: Region, ledger: Ledger) -> None:
        self.region: Region | None = region
        self.value: torch.Tensor | None = None
        self._ledger = ledger
        self._recovered: Recovered | None = None

    def fill(self, value: torch.Tensor, recovered: Recovered) -> None:
        """`recovered`: the account of the value's storage."""
        self.value = value
        self._recovered = recovered
        self.region = None  # the region, with its inputs, is needed no more by this value

    def read(self) -> torch.Tensor:
        if self.value is None:
            assert self.region is not None
            with self._ledger.recomputing():
                self.region.recompute()
        assert self.value is not None, "a recomputation fills every live slot"
        return self.value


class PackedInner:
    """A tensor saved inside a recomputed region: the n-th one that the recomputation saves."""

    __slots__ = ("_dtype", "name", "_shape", "_slot", "_watch")

    def __init__(self, slot: Slot, tensor: torch.Tensor, name: str) -> None:
        self._slot = slot
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._watch = VersionWatch(tensor)
        self.name = name

    def get(self) -> torch.Tensor:
        self._watch.check(self.name)
        value = self._slot.read()
        if value.shape != self._shape or value.dtype != self._dtype:
            raise RuntimeError(
                f"recomputing {self.name} gave a {value.dtype} tensor of shape {tuple(value.shape)} where the first run"
                f" gave {self._dtype} {tuple(self._shape)}: the operator is not a function of its inputs. Leave"
                " 'recompute' out of strategies."
            )
        return value


class PackedOutput:
    """A tensor that lies in an output of a recomputed region."""

    __slots__ = ("name", "slot", "_storage_bytes", "_view", "_watch")

    def __init__(self, slot: Slot, tensor: torch.Tensor, name: str) -> None:
        self.slot = slot
        self._view = View(tensor)
        self._storage_bytes = tensor.untyped_storage().nbytes()
        self._watch = VersionWatch(tensor)
        self.name = name

    def get(self) -> torch.Tensor:
        self._watch.check(self.name)
        value = self.slot.read()
        storage = value.untyped_storage()
        if storage.nbytes() != self._storage_bytes:
            raise RuntimeError(
                f"recomputing {self.name} gave {storage.nbytes()} bytes where the first run gave {self._storage_bytes}"
                ": the operator is not a function of its inputs. Leave 'recompute' out of strategies."
            )
        return self._view.of(storage, value.device)


class StoredValue(Protocol):
    """A storage that lies elsewhere or in another form, and can come back."""

    def read(self) -> torch.Tensor:
        """A tensor on the storage's original device whose storage has the original bytes."""
        ...


class PackedStored:
    """A tensor whose storage was offloaded or quantized."""

    __slots__ = ("name", "_stored", "_view", "_watch")

    def __init__(self, stored: StoredValue, tensor: torch.Tensor, name: str) -> None:
        self._stored = stored
        self._view = View(tensor)
        self._watch = VersionWatch(tensor)
        self.name = name

    def get(self) -> torch.Tensor:
        self._watch.check(self.name)
        value = self._stored.read()
        return self._view.of(value.untyped_storage(), value.device)


def alive(reference: weakref.ref | None):
    """What a weak reference points at, or None."""
    return None if reference is None else reference()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; autograd hands most over in that form already."""
    return tensor.detach() if tensor.requires_grad else tensor


def _check_version(tensor: torch.Tensor, version: int, name: str) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"saved in {name} was at version {version} and is now at version {tensor._version}. Use the out-of-place "
            "form of the operation that changed it."
        )
