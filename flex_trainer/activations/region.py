"""Recompute: one run of an operator whose internals and outputs are dropped, and its recomputation in backward.

    forward    region R runs under pack hooks. What it saves is numbered 0, 1, 2, ... and dropped; its outputs are
               remembered by storage, so that a later operator which saves one of them gets "output k of R, this view".
    backward   the first value that is asked for recomputes R from its inputs, in the state of the first run (random
               streams, autocast, what the module had in its attributes). The n-th tensor the recomputation saves fills
               the n-th slot; the k-th output fills the slot of output k. Slots that are no longer held are skipped, and
               the recomputation stops once the last needed one is full.

The inputs are packed values themselves: an input that was dropped too is recovered by recomputing its region first.

A region may have routers inside. What they gave in the first run is kept, and given again (routed.py): the rest of the
recomputation sees the very decisions of the first run.
This is the paper's recompute (BaGuaLu-2, section IV-B) at the granularity of an operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from flex_trainer.activations.context import ExecutionState, no_scope
from flex_trainer.activations.first_parameters import parts_of
from flex_trainer.activations.hooks import InnerHooks
from flex_trainer.activations.identity import is_plain, storage_key
from flex_trainer.activations.leaves import leaves_of, mapped, tensors_of
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.made_weights import MadeWeights
from flex_trainer.activations.module_state import ModuleState
from flex_trainer.activations.packed_leaf import PackedLeaf, recovered
from flex_trainer.activations.quick_state import QuickState, state_of
from flex_trainer.activations.routed import Routed, routing_is
from flex_trainer.activations.values import Packed, Recovered, Slot, alive


class _RecomputeDone(Exception):
    """Raised inside a recomputation when the last needed value was saved."""


class Region:
    """One run of one operator under the strategy recompute."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pack_input: Callable[[torch.Tensor], Packed],
        ledger: Ledger,
        module: nn.Module | None = None,
        *,
        has_exchange: bool = False,
    ) -> None:
        """`pack_input` turns a tensor argument into a packed value; everything else is kept as it is. `module`: whose
        parameters the function uses. `has_exchange`: whether other ranks take part in it."""
        self.name = name
        self.dropped_bytes = 0
        """Of values that its recomputation brings back."""
        self._has_exchange = has_exchange
        self._is_running = False
        self._function = function
        device: torch.device | None = None  # whose random stream the operator may draw from, beside the CPU's

        def pack(leaf: Any) -> Any:
            nonlocal device
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if device is None and leaf.device.type not in _WITHOUT_STREAM:
                device = leaf.device
            return PackedLeaf(leaf, pack_input)

        # Lists and tuples of the call are made anew, so that what the caller does to its own later is not seen.
        self._args = tuple([mapped(pack, arg) for arg in args])
        self._kwargs = {name: mapped(pack, value) for name, value in kwargs.items()}
        self._module_state: ModuleState | QuickState | None = None
        self._hooks: InnerHooks | None = None
        self._made: MadeWeights | None = None
        if module is not None:
            parts = parts_of(module)
            self._module_state = state_of(module, parts)
            if len(parts) > 1:
                self._hooks = InnerHooks(module)
            if type(self._module_state) is ModuleState:  # a module with weights that are made is not remembered quickly
                self._made = MadeWeights(parts)
        made = [] if self._made is None else self._made.tensors
        self.made_before = {storage_key(tensor) for tensor in made if is_plain(tensor)}
        """Storages of weights that were made before: during the first run, these are inputs."""
        self._made_leaves = [PackedLeaf(tensor, pack_input) for tensor in made]
        self._state = ExecutionState(device or torch.device("cpu"))
        self._ledger = ledger
        self.routed = Routed()
        self._inner: dict[int, weakref.ref[Slot]] = {}
        self._outputs: dict[int, weakref.ref[Slot]] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_saved: Callable[[], int]) -> Any:
        """The first run. `num_saved`: how many tensors the region has saved so far.

        Raises:
            RuntimeError: the operator changes one of its inputs.
        """
        inputs = [(tensor, tensor._version) for tensor in tensors_of(args, kwargs) if is_plain(tensor)]
        try:
            with _NOTHING if self._hooks is None or self._hooks.are_none() else self._hooks.first_run(num_saved):
                result = self._function(*args, **kwargs)
        finally:
            self.routed.end_first_run()
        if self._module_state is not None:
            self._module_state.note_first_run()
        if self._made is not None:
            is_read = self._made.note_first_run()
            self._made_leaves = [leaf for leaf, read in zip(self._made_leaves, is_read, strict=True) if read]
        self.made_before.clear()
        if any(tensor._version != version for tensor, version in inputs):
            raise RuntimeError(
                f"{self.name} changes one of its inputs in place, so it cannot be run a second time in backward. Use "
                "the out-of-place form of that operation, or leave 'recompute' out of strategies."
            )
        return result

    def inner_slot(self, number: int) -> Slot:
        """A slot for the `number`-th tensor that the region saves."""
        slot = Slot(self, self._ledger)
        self._inner[number] = weakref.ref(slot)
        return slot

    def output_slot(self, index: int) -> Slot:
        """The slot of output leaf `index`, shared by all packed values that lie in it."""
        slot = alive(self._outputs.get(index))
        if slot is None:
            slot = Slot(self, self._ledger)
            self._outputs[index] = weakref.ref(slot)
        return slot

    @property
    def is_awaited(self) -> bool:
        """Whether values of it are still to be brought back, and nobody is at it."""
        slots = (alive(reference) for reference in (*self._inner.values(), *self._outputs.values()))
        return not self._is_running and any(slot is not None and slot.value is None for slot in slots)

    def may_run_alone(self) -> bool:
        """Whether its recomputation takes no other rank: neither it nor what has to be recomputed for its inputs
        exchanges anything."""
        if self._has_exchange or self._is_running:
            return False
        leaves = (leaf for leaf in leaves_of((self._args, self._kwargs)) if type(leaf) is PackedLeaf)
        sources = (leaf.region for leaf in (*leaves, *self._made_leaves))
        return all(source is None or source.may_run_alone() for source in sources)

    def recompute(self) -> None:
        """Run the operator again and fill every live slot. Random streams are left as they were found."""
        self._is_running = True
        try:
            self._recompute()
        finally:
            self._is_running = False

    def _recompute(self) -> None:
        inner = {number: slot for number, ref in self._inner.items() if (slot := ref()) and slot.value is None}
        outputs = {index: slot for index, ref in self._outputs.items() if (slot := ref()) and slot.value is None}
        args = [recovered(arg) for arg in self._args]
        kwargs = {name: recovered(value) for name, value in self._kwargs.items()}
        last_inner = max(inner, default=-1)
        number = -1
        brought_back: dict[int, Recovered] = {}  # by storage: several slots may be views of one

        def fill(slot: Slot, value: torch.Tensor) -> None:
            value = value.detach()  # a saved result still carries the recomputation's own graph
            key = value.untyped_storage()._cdata
            if key not in brought_back:
                brought_back[key] = Recovered(self._ledger, value.untyped_storage().nbytes())
            slot.fill(value, brought_back[key])

        def capture(tensor: torch.Tensor) -> None:
            nonlocal number
            number += 1
            if number in inner:
                fill(inner[number], tensor)
            if number == last_inner and not outputs:
                raise _RecomputeDone

        def never(_: None) -> torch.Tensor:
            raise AssertionError("a recomputation's own graph never runs backward")

        module_state = _NOTHING if self._module_state is None else self._module_state.restored(self.name)
        hooks = _NOTHING if self._hooks is None or self._hooks.are_none() else self._hooks.recompute()
        made = [leaf.recover() for leaf in self._made_leaves]
        routed = self.routed.recovered()
        with (
            module_state,
            _NOTHING if self._made is None else self._made.found(made),
            hooks,
            no_scope(),
            routing_is(routed),
            self._state.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(capture, never),
        ):
            try:
                result = self._function(*args, **kwargs)
            except _RecomputeDone:
                result = None
        if outputs:
            leaves = leaves_of(result)
            for index, slot in outputs.items():
                fill(slot, leaves[index])
        self._ledger.num_recomputes += 1
        missing = [number for number, slot in inner.items() if slot.value is None]
        if missing:
            raise RuntimeError(
                f"recomputing {self.name} saved fewer tensors than its first run did (number {missing[0]} is missing):"
                " the operator takes another path the second time. Leave 'recompute' out of strategies, or report the"
                " model."
            )


_WITHOUT_STREAM = frozenset({"cpu", "meta"})
_NOTHING: AbstractContextManager[None] = nullcontext()
