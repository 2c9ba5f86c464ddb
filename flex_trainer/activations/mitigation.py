"""Storages of one forward that are put elsewhere (offload) or into another form (quantize)."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from flex_trainer.activations.clock import Clock
from flex_trainer.activations.entry import Entry
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.quantize import NonFinite, QuantizedValue, is_seen_at_once
from flex_trainer.activations.trace import ValueTrace
from flex_trainer.activations.values import StoredValue, alive
from flex_trainer.strategy import Strategy


class Mitigation:
    """Puts storages where their strategies say.

    Args:
        clock: the time it takes is no operator's.
        store: for what is offloaded; asked for when it is needed.
        quantize_dtype: of the codes.
        min_bytes: smaller storages are kept.
        non_finite: what earlier micro-batches have found, which this one adds to.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        store: Callable[[], OffloadStore] | None,
        quantize_dtype: torch.dtype,
        min_bytes: int,
        non_finite: NonFinite,
    ) -> None:
        self.min_bytes = min_bytes
        self._ledger = ledger
        self._clock = clock
        self._store = store
        self._quantize_dtype = quantize_dtype
        self._non_finite = non_finite
        self._flags: list[tuple[tuple[str, int], int, torch.Tensor]] = []  # of quantized values: not read yet

    def put(self, entry: Entry, tensor: torch.Tensor, value: ValueTrace, key: tuple[str, int]) -> StoredValue | None:
        """Offload or quantize the storage, unless it is too small, already held as it is, or of the wrong kind.

        Args:
            key: the operator that made it, and the how manieth of its values it is: the same in other micro-batches.
        """
        if entry.num_bytes < self.min_bytes or alive(entry.holding) is not None:
            return None
        stored: StoredValue | None = None
        start = self._clock.mark()
        if entry.strategy is Strategy.OFFLOAD and self._store is not None:
            stored = self._store().put(tensor, self._ledger)
        elif entry.strategy is Strategy.QUANTIZE and QuantizedValue.shrinks(tensor, value.layout):
            stored = self._quantized(entry, tensor, value, key)
        self._clock.pause(start)
        if stored is not None:
            entry.stored = weakref.ref(stored)
            entry.pin(entry.stored)
        return stored

    def _quantized(
        self, entry: Entry, tensor: torch.Tensor, value: ValueTrace, key: tuple[str, int]
    ) -> QuantizedValue | None:
        """The storage in 8 bits; None where it is known not to be finite."""
        if is_seen_at_once(tensor.device):
            if QuantizedValue.is_finite(tensor):
                return QuantizedValue(tensor, self._quantize_dtype, self._ledger, value.layout)
            value.has_infinity = QuantizedValue.has_infinity(tensor)
            return None
        if self._non_finite.has(*key):
            value.has_infinity = self._non_finite.has_infinity(*key)
            return None
        stored = QuantizedValue(tensor, self._quantize_dtype, self._ledger, value.layout, is_finite=False)
        if stored.flag is not None:
            self._flags.append((key, entry.value, stored.flag))
        return stored

    def read_flags(self, values: list[ValueTrace]) -> None:
        """Note in the trace which values were not finite. On CUDA this waits for the device."""
        if not self._flags:
            return
        keys, numbers, flags = map(list, zip(*self._flags, strict=True))
        self._flags.clear()
        self._non_finite.note(keys, flags)
        for key, number in zip(keys, numbers, strict=True):
            values[number].has_infinity |= self._non_finite.has_infinity(*key)
