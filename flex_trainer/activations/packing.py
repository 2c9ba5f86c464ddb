"""In which form each tensor that autograd saves is held.

Every storage has one producer: the operator whose run made it, or, for what is computed between operators, the
enclosing block. The producer's strategy governs the storage, wherever it is saved and however often. That rules out by
construction what the paper calls conflicting mitigation (BaGuaLu-2, section V-A): one logical tensor in two precisions
or on two devices, because two consumers chose differently.

What a recomputed region makes is dropped. Two things are not: what its routers decide, so that a routing decision is
never made twice, and, where the region is a whole layer, what others need of its outputs, so that to bring back one
layer does not take all those below it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.demand import Demand
from flex_trainer.activations.entry import Entry
from flex_trainer.activations.identity import StorageTable, is_plain
from flex_trainer.activations.leaves import leaves_of
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.mitigation import Mitigation
from flex_trainer.activations.place import OUTSIDE
from flex_trainer.activations.referred import ReferredStorages
from flex_trainer.activations.region import Region
from flex_trainer.activations.residency import Residency
from flex_trainer.activations.storage_layout import StorageLayout
from flex_trainer.activations.trace import Trace, ValueTrace
from flex_trainer.activations.values import (
    Holding,
    Packed,
    PackedInner,
    PackedKept,
    PackedOutput,
    PackedReference,
    PackedStored,
    StoredValue,
    alive,
    detached,
)
from flex_trainer.strategy import Site, Strategy


class Packing:
    """The saved tensors of one micro-batch's forward: the part of a scope that packs them. `Scope` keeps the running
    operators and the region up to date.

    Args:
        ledger: what is held is counted in.
        mitigation: offloads and quantizes.
        residency: of weights that come and go; None: none do.
    """

    def __init__(self, ledger: Ledger, mitigation: Mitigation, residency: Residency | None) -> None:
        self.ledger = ledger
        self.mitigation = mitigation
        self._residency = residency
        self._demand = Demand(ledger)
        self._trace = Trace()
        self._first_values: list[int] = []  # of each call
        self._referred = ReferredStorages()
        self._table: StorageTable[Entry] = StorageTable()
        self._running: list[Site] = []  # operators that are running, innermost last; after an error, where it came from
        self._stack: list[int] = []  # their calls,
        self._between: list[Strategy] = []  # and what becomes of what is computed between their operators
        self._region: Region | None = None  # the region that is running, if any,
        self._region_call = -1  # and its call
        self._num_packs = 0  # in the running region

    # What operators make

    def _note_outputs(self, index: int, strategy: Strategy, result: Any, region: Region | None) -> None:
        call = self._trace.calls[index]
        if region is not None and call.site.keeps_outputs:
            region = None  # they are held
        for number, leaf in enumerate(leaves_of(result)):
            if not isinstance(leaf, torch.Tensor) or not is_plain(leaf):
                continue
            storage = leaf.untyped_storage()
            entry = self._table.get(storage)
            if entry is None:
                if self._referred.has(leaf, storage):
                    continue
                entry = self._new_entry(leaf, storage, index, strategy)
            elif entry.owner != index and not self._trace.is_inside(entry.owner, index):
                continue  # an input handed through: its producer governs it
            call.output_bytes += entry.num_bytes
            if call.site.is_router:
                entry.is_router_output = self._trace.values[entry.value].is_decision = True
                self._demand.keep(entry)
            if region is not None and entry.region is None and entry.holding is None:
                entry.region, entry.version = (region, number), leaf._version
                self._table.watch(storage)

    # What autograd saves

    def _pack(self, tensor: torch.Tensor) -> Packed:
        """Outside of recomputed regions."""
        entry = self._entry(tensor)
        if entry is None:
            return self._refer(tensor)
        self._note_change(entry, tensor)
        self._count(entry)
        return self._hold(entry, tensor)

    def _pack_inner(self, tensor: torch.Tensor) -> Packed:
        """Inside a recomputed region: hold inputs and decisions, number what the recomputation will save again, refer
        to the rest."""
        number = self._num_packs
        self._num_packs += 1
        region = self._region
        assert region is not None
        if not is_plain(tensor):
            return self._refer(tensor)
        storage = tensor.untyped_storage()
        entry = self._table.get(storage)
        if entry is None:
            if self._referred.has(tensor, storage):
                return self._refer(tensor)
            entry = self._new_entry(tensor, storage, self._stack[-1], self._between[-1])
        else:
            self._note_change(entry, tensor)
            is_made_before = bool(region.made_before) and storage._cdata in region.made_before
            if is_made_before or not self._trace.is_inside(entry.owner, self._region_call):
                self._count(entry)
                return self._hold(entry, tensor)  # an input of the region, or a value from before it
        if self._trace.values[entry.value].is_decision:
            self._count(entry)
            return self._hold(entry, tensor)
        if not entry.is_counted:
            self._demand.drop(entry)
            region.dropped_bytes += entry.num_bytes
        self._count(entry)
        slot = region.inner_slot(number)
        entry.pin(weakref.ref(slot))
        return PackedInner(slot, tensor, region.name)

    def _pack_input(self, tensor: torch.Tensor) -> Packed:
        """A tensor that a region needs for its recompute."""
        entry = self._entry(tensor)
        if entry is None:
            return self._reference(tensor)
        self._note_change(entry, tensor)
        return self._hold(entry, tensor)

    def _refer(self, tensor: torch.Tensor) -> PackedReference:
        """The packed form of a parameter, or of a tensor of a kind that is left alone."""
        self.ledger.num_unmanaged += not is_plain(tensor)
        return self._reference(tensor)

    def _reference(self, tensor: torch.Tensor) -> PackedReference:
        # A parameter has no graph to keep alive, and kernels may look for attributes on it.
        return PackedReference(tensor if type(tensor) is nn.Parameter else detached(tensor), self._name())

    def _hold(self, entry: Entry, tensor: torch.Tensor) -> Packed:
        """The packed form of a tensor whose storage is known."""
        strategy, name = entry.strategy, self._owner_name(entry)
        if entry.region is not None and self._is_whole(entry.region[0]):
            region, output = entry.region
            slot = region.output_slot(output)
            entry.pin(weakref.ref(slot))
            return PackedOutput(slot, tensor, name)
        # A storage of rounded numbers may be shown as numbers only, never as integers or bits.
        is_mitigated = strategy is Strategy.OFFLOAD or (
            strategy is Strategy.QUANTIZE and (tensor.is_floating_point() or tensor.is_complex())
        )
        if is_mitigated:
            stored = alive(entry.stored) or self._put(entry, tensor, name)
            if stored is not None:
                return PackedStored(stored, tensor, name)
        holding = alive(entry.holding)
        if holding is None:
            holding = Holding(self.ledger, entry.num_bytes)
            entry.holding = weakref.ref(holding)
            entry.pin(entry.holding)
        return PackedKept(detached(tensor), holding, name)

    def _put(self, entry: Entry, tensor: torch.Tensor, name: str) -> StoredValue | None:
        number = entry.value - (self._first_values[entry.owner] if entry.owner >= 0 else 0)
        return self.mitigation.put(entry, tensor, self._trace.values[entry.value], (name, number))

    def _count(self, entry: Entry) -> None:
        """Note that autograd saves this storage, once per storage in the ledger, once per saver in the trace."""
        value = self._trace.values[entry.value]
        saver = self._stack[-1] if self._stack else -1
        if not value.savers or value.savers[-1] != saver:
            value.savers.append(saver)
        if not entry.is_counted:
            self._demand.count(entry)
            if entry.region is not None and self._is_whole(entry.region[0]):
                self._demand.drop(entry)
                entry.region[0].dropped_bytes += entry.num_bytes

    def _note_change(self, entry: Entry, tensor: torch.Tensor) -> None:
        """A storage that was changed in place since it was made (noise multiplied into a norm's output) is what the
        code that changed it made, which is between the operators of the innermost block around its maker and its saver:
        recomputing the maker does not bring it back, so neither a plan nor a run may count on that."""
        if entry.version == tensor._version:
            return
        while entry.owner not in self._stack and entry.owner >= 0:
            entry.owner = self._trace.calls[entry.owner].parent
        at = self._stack.index(entry.owner) if entry.owner >= 0 else -1
        entry.strategy = self._between[at] if at >= 0 else Strategy.KEEP
        entry.version = tensor._version
        entry.region = entry.stored = None
        self._demand.keep(entry)
        self._trace.values[entry.value].owner = entry.owner

    def _is_whole(self, region: Region) -> bool:
        """Whether a region can be run again in the backward of the operator that saves one of its outputs now."""
        return self._residency is None or self._residency.is_whole(region.name, self._name())

    # Identity

    def _entry(self, tensor: torch.Tensor) -> Entry | None:
        """What is known of the tensor's storage; None for parameters and for kinds of tensors left alone."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        entry = self._table.get(storage)
        if entry is not None:
            return entry
        if self._referred.has(tensor, storage):
            return None
        if not self._stack:
            return self._new_entry(tensor, storage, -1, Strategy.KEEP)
        return self._new_entry(tensor, storage, self._stack[-1], self._between[-1])

    def _new_entry(self, tensor: torch.Tensor, storage: torch.UntypedStorage, owner: int, strategy: Strategy) -> Entry:
        num_bytes = storage.nbytes()
        is_decision = owner >= 0 and self._trace.calls[owner].site.is_router and not tensor.is_floating_point()
        self._trace.values.append(
            ValueTrace(
                owner, num_bytes, tensor.element_size(), layout=StorageLayout.of(tensor), is_decision=is_decision
            )
        )
        entry = Entry(owner, strategy, len(self._trace.values) - 1, tensor._version, num_bytes)
        return self._table.put(storage, entry)

    def _name(self) -> str:
        return self._running[-1].name if self._running else OUTSIDE

    def _owner_name(self, entry: Entry) -> str:
        return self._trace.calls[entry.owner].site.name if entry.owner >= 0 else OUTSIDE
