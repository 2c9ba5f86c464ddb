"""Offload: activations move to a lower tier in forward and come back in backward.

The tier (a file when the device is the CPU, pinned host memory when it is a GPU) knows how to copy; this file knows
when: a copy starts as soon as the value is saved, copies in flight are bounded, a value asked for before its copy has
ended is simply still there, and reading one value starts the copies of those that backward will want next.

"Wait" means what the tier makes of it: on a CPU the thread waits; on CUDA a stream does, and the host goes on.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any, Protocol

import torch

from flex_trainer.activations.ledger import CopyTime, Ledger
from flex_trainer.activations.values import alive

MAX_IN_FLIGHT_BYTES = 64 * 2**20
_DIRECTORY_REMEDY = "Free space there, or set offload_to to a directory with more room."


class Copy(Protocol):
    """A copy on its way. Both ways of waiting may be asked for any number of times."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """What this thread does from now on finds the copy made.

        Raises:
            OSError: the copy could not be made.
        """
        ...

    def release(self) -> None:
        """What is done from now on with the memory at both ends, by whomever it is given to, comes after the copy.

        Raises:
            OSError: the copy could not be made.
        """
        ...

    def time(self) -> CopyTime | None:
        """What the copy took; None where it has not ended, or where the tier cannot tell."""
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
        """Start copying up into the flat uint8 tensor `target`; the write to `place` has been released."""
        ...

    def free(self, place: Place) -> None:
        """The place may be used again: its copies have been released. Called from destructors, so it takes no locks."""
        ...

    def describe(self) -> str: ...


class OffloadStore:
    """All offloaded values of a run, in the order in which forward saved them.

    Args:
        tier: where they go.
        max_in_flight_bytes: bound on the bytes of copies on their way.
        remedy: what a user can do when the tier refuses a value.
    """

    def __init__(
        self, tier: Tier, max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES, remedy: str = _DIRECTORY_REMEDY
    ) -> None:
        self.tier = tier
        self._remedy = remedy
        self.failure: str | None = None
        """Why the tier refused a value, once it did: from then on values are kept on the device."""
        self.max_in_flight_bytes = max_in_flight_bytes
        """Bound on the bytes of copies on their way: down in forward, ahead of need in backward."""
        # Weak: a value that is no longer referenced ends its own copy and is freed.
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

    def poll(self) -> None:
        """Let go of the sources whose copies have ended, without waiting for the others."""
        if self._in_flight:
            with self._lock:
                self._collect()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes still on the device because their copy down was not seen to have ended."""
        if not self._in_flight:  # asked for after every router
            return 0
        values = [value for reference in list(self._in_flight) if (value := alive(reference)) is not None]
        return sum(value.num_bytes for value in values if value.is_in_flight)

    def prefetch_before(self, number: int) -> None:
        """Start reading the values saved just before value `number`: backward wants them next.

        Bounded in bytes, values that are on the device already included. Reading ahead is a convenience, so where the
        device has no room for it, it is left.
        """
        budget_bytes = self.max_in_flight_bytes
        with self._lock:
            for index in range(min(number, len(self._order)) - 1, -1, -1):
                value = alive(self._order[index])
                if value is None:
                    continue
                budget_bytes -= value.num_bytes
                if budget_bytes < 0:
                    return
                try:
                    value.start_read()
                except torch.OutOfMemoryError:
                    return

    def forget_dead(self) -> None:
        """Drop the order's entries of values that died; called between micro-batches."""
        with self._lock:
            self._order = [reference for reference in self._order if reference() is not None]
            for number, reference in enumerate(self._order):
                if (value := reference()) is not None:
                    value.number = number

    def _drain(self, incoming_bytes: int) -> None:
        """Wait until `incoming_bytes` more may be in flight."""
        values = self._collect()
        in_flight_bytes = sum(value.num_bytes for value in values)
        while values and in_flight_bytes + incoming_bytes > self.max_in_flight_bytes:
            oldest = values.pop(0)
            oldest.end_write(is_forced=True)
            in_flight_bytes -= oldest.num_bytes
        self._in_flight = [weakref.ref(value) for value in values]

    def _collect(self) -> list[OffloadedValue]:
        """Let go of the sources whose copies have ended. Returns the values that are still in flight."""
        values = [value for reference in self._in_flight if (value := alive(reference)) is not None]
        values = [value for value in values if not value.end_write(is_forced=False)]
        self._in_flight = [weakref.ref(value) for value in values]
        return values

    def fail(self, error: OSError) -> None:
        """Take no more values: the tier refused one."""
        if self.failure is not None:
            return  # the copies that were on their way fail one by one; once is enough to tell
        self.failure = (
            f"offload to {self.tier.describe()} failed ({error}); the values stay on the device and offload is off "
            f"from now on. {self._remedy}"
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
        self._was_read = False
        self._lock = threading.RLock()
        ledger.hold(self.num_bytes)

    @property
    def is_in_flight(self) -> bool:
        return self._write is not None

    def end_write(self, is_forced: bool) -> bool:
        """Let go of the source if its copy has ended; `is_forced`: wait until it has. Returns whether it has."""
        with self._lock:
            if self._write is None:
                return True
            if not is_forced and not self._write.is_done():
                return False
            with self._ledger.waiting():
                error = _end(self._write)
            self._note_time(self._write)
            self._write = None
            if error is not None:
                # The source is still here: nothing is lost, the value is simply kept (and counted as held).
                self._store.fail(error)
                return True
            self._source = None
            self._ledger.release(self.num_bytes)
            self._ledger.freed("offload", self.num_bytes)
            self._ledger.num_offloaded += 1
            return True

    def start_read(self) -> None:
        with self._lock:
            if self._value is not None or self._source is not None:
                return
            value = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            # In this order: where the copy cannot be started, the next one who asks starts it, and finds no garbage.
            self._read = self._store.tier.read(self._place, value)
            self._value = value
            self._ledger.recover(self.num_bytes)

    def read(self) -> torch.Tensor:
        """The storage's bytes on its device: the source itself, where its copy has not ended yet."""
        self._store.poll()
        with self._lock:
            self.start_read()
            is_first = not self._was_read
            self._was_read = True
        if is_first:
            # Not under our own lock: this takes the locks of other values, whose readers may be here at the same time.
            self._store.prefetch_before(self.number)
        with self._lock:
            if self._source is not None:
                return self._source
            self.start_read()  # had its copy not ended before, it may have now
            assert self._read is not None and self._value is not None
            with self._ledger.waiting():
                self._read.wait()  # every time: another reader may be on another stream
            if is_first:
                self._note_time(self._read)
            return self._value

    def _note_time(self, copy: Copy) -> None:
        took = copy.time()
        if took is not None:
            self._ledger.copies.append(took)

    def __del__(self) -> None:
        # The place may be given to another value only when no copy uses it any more; a copy that failed has ended too.
        for copy in (self._write, self._read):
            if copy is not None:
                _end(copy)  # the value is no longer referenced, so the error is ignored
        if self._source is not None:
            self._ledger.release(self.num_bytes)
        elif self._value is not None:
            self._ledger.recover(-self.num_bytes)
        self._store.tier.free(self._place)


def _end(copy: Copy) -> OSError | None:
    """Release a copy and return its error, if any, without the traceback: its frames would keep the value alive."""
    try:
        copy.release()
    except OSError as error:
        return error.with_traceback(None)
    return None


def flat_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """The whole storage as a flat uint8 tensor (no copy)."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
