"""Offload: activations move to a lower tier in forward and come back in backward.

The tier (a file when the device is the CPU, pinned host memory when it is a GPU) knows how to copy; this file knows
when: a copy starts as soon as the value is saved, copies in flight are bounded, a value asked for before its copy has
ended is simply still there, and reading one value starts the copies of those that backward will want next.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any, Protocol

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.values import alive

MAX_IN_FLIGHT_BYTES = 64 * 2**20


class Copy(Protocol):
    """A copy on its way."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Block until the copy has ended.

        Raises:
            OSError: the copy could not be made.
        """
        ...


Place = Any
"""Where one storage lies in the lower tier: only its tier knows what it is."""


class Tier(Protocol):
    """A lower memory tier."""

    def write(self, source: torch.Tensor) -> tuple[Place, Copy]:
        """Start copying the flat uint8 tensor `source` down.

        Raises:
            OSError: the tier is full.
        """
        ...

    def read(self, place: Place, target: torch.Tensor) -> Copy:
        """Start copying up into the flat uint8 tensor `target`."""
        ...

    def free(self, place: Place) -> None: ...

    def describe(self) -> str: ...


class OffloadStore:
    """All offloaded values of a run, in the order in which forward saved them."""

    def __init__(self, tier: Tier, max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self.tier = tier
        self.failure: str | None = None
        """Why the tier refused a value, once it did: from then on values are kept on the device."""
        self.max_in_flight_bytes = max_in_flight_bytes
        """Bound on the bytes of copies on their way: down in forward, ahead of need in backward."""
        # Weak: a value that nobody wants any more ends its own copy and goes.
        self._in_flight: list[weakref.ref[OffloadedValue]] = []
        self._order: list[weakref.ref[OffloadedValue]] = []
        self._lock = threading.RLock()

    def put(self, tensor: torch.Tensor, ledger: Ledger) -> OffloadedValue | None:
        """Start moving the tensor's whole storage down. None when the tier has no room: then keep the value."""
        if self.failure is not None:
            return None
        source = flat_bytes(tensor.untyped_storage(), tensor.device)
        with self._lock:
            self._drain(len(source))
            try:
                place, copy = self.tier.write(source)
            except OSError as error:
                self.fail(error)
                return None
            value = OffloadedValue(self, ledger, source, place, copy, number=len(self._order))
            self._in_flight.append(weakref.ref(value))
            self._order.append(weakref.ref(value))
        return value

    def settle(self) -> None:
        """Wait for every copy in flight; called when forward ends, so that what was freed really is."""
        with self._lock:
            self._drain(self.max_in_flight_bytes)

    def prefetch_before(self, number: int) -> None:
        """Start reading the values saved just before value `number`: backward wants them next."""
        budget_bytes = self.max_in_flight_bytes
        with self._lock:
            for reference in reversed(self._order[:number]):
                value = alive(reference)
                if value is None:
                    continue
                budget_bytes -= value.num_bytes
                if budget_bytes < 0:
                    return
                value.start_read()

    def forget_dead(self) -> None:
        """Drop the order's entries of values that died; called between micro-batches."""
        with self._lock:
            self._order = [reference for reference in self._order if reference() is not None]
            for number, reference in enumerate(self._order):
                if (value := reference()) is not None:
                    value.number = number

    def _drain(self, incoming_bytes: int) -> None:
        """Wait until `incoming_bytes` more may be in flight."""
        values = [value for reference in self._in_flight if (value := alive(reference)) is not None]
        values = [value for value in values if not value.end_write(block=False)]
        in_flight_bytes = sum(value.num_bytes for value in values)
        while values and in_flight_bytes + incoming_bytes > self.max_in_flight_bytes:
            oldest = values.pop(0)
            oldest.end_write(block=True)
            in_flight_bytes -= oldest.num_bytes
        self._in_flight = [weakref.ref(value) for value in values]

    def fail(self, error: OSError) -> None:
        """Take no more values: the tier refused one."""
        if self.failure is not None:
            return  # the copies that were on their way fail one by one; once is enough to tell
        self.failure = (
            f"offload to {self.tier.describe()} failed ({error}); the values stay on the device and offload is off "
            "from now on. Free space there, or set offload_to to a directory with more room."
        )
        warnings.warn(self.failure, stacklevel=2)


class OffloadedValue:
    """One storage in the lower tier (or on its way there, or back again)."""

    def __init__(
        self, store: OffloadStore, ledger: Ledger, source: torch.Tensor, place: Place, copy: Copy, number: int
    ) -> None:
        self.number = number
        self.num_bytes = source.numel()
        self._store = store
        self._ledger = ledger
        self._device = source.device
        self._place = place
        # Alive until the copy has ended; for good when it failed.
        self._source: torch.Tensor | None = source
        self._write: Copy | None = copy
        self._read: Copy | None = None
        self._value: torch.Tensor | None = None
        self._lock = threading.RLock()
        ledger.hold(self.num_bytes)

    def end_write(self, block: bool) -> bool:
        """Let go of the source once its copy has ended. Returns whether it has."""
        with self._lock:
            if self._write is None:
                return True
            if not block and not self._write.is_done():
                return False
            error = _end(self._write)
            self._write = None
            if error is not None:
                # The source is still here: nothing is lost, the value is simply kept (and counted as held).
                self._store.fail(error)
                return True
            self._source = None
            self._ledger.release(self.num_bytes)
            self._ledger.freed("offload", self.num_bytes)
            return True

    def start_read(self) -> None:
        with self._lock:
            if self._value is not None or self._source is not None:
                return
            self._value = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            self._ledger.recover(self.num_bytes)
            self._read = self._store.tier.read(self._place, self._value)

    def read(self) -> torch.Tensor:
        with self._lock:
            if self._source is not None:
                return self._source
            self.start_read()
            is_on_its_way = self._read is not None
        if is_on_its_way:
            # Not under our own lock: this takes the locks of other values, whose readers may be here at the same time.
            self._store.prefetch_before(self.number)
        with self._lock:
            if self._read is not None:
                self._read.wait()
                self._read = None
            assert self._value is not None
            return self._value

    def __del__(self) -> None:
        # The place may be given to another value only when no copy uses it any more; a copy that failed has ended too.
        for copy in (self._write, self._read):
            if copy is not None:
                _end(copy)  # nobody wants the value any more, so its error is of no interest
        if self._source is not None:
            self._ledger.release(self.num_bytes)
        elif self._value is not None:
            self._ledger.recover(-self.num_bytes)
        self._store.tier.free(self._place)


def _end(copy: Copy) -> OSError | None:
    """Wait for a copy and return its error, if any, without the traceback: its frames would keep the value alive."""
    try:
        copy.wait()
    except OSError as error:
        return error.with_traceback(None)
    return None


def flat_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """The whole storage as a flat uint8 tensor (no copy)."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
