"""Memory of one CUDA device, in torch's allocated bytes. See `meter.py` for the words."""

from __future__ import annotations

import threading
import time
import warnings
from typing import NamedTuple

import torch

from flex_trainer.config import AUTO_LIMIT_SHARE
from flex_trainer.errors import UserError
from flex_trainer.memory.allocator import (
    EXPANDABLE_SEGMENTS_ADVICE,
    has_expandable_segments,
    largest_free_block,
    read_allocator,
    with_index,
)
from flex_trainer.memory.meter import SAMPLE_SECONDS
from flex_trainer.units import format_bytes

_CUDA_SAMPLE_SHARE = 0.01
"""On CUDA they never take more than this share of the host's time."""
_LEAST_ROUNDED_BYTES = 2**24
_MOST_ROUNDING = 1.25
"""Rounding is learnt from windows that allocate this much, and believed up to here."""


class CudaMeter:
    """Memory of one CUDA device, in allocated bytes (sizes as the allocator rounds them).

    The windows are those of the runtime: from the first forward of the micro-batches in flight to the end of their
    last backward. Statistics follow the host's order of allocations, so nothing here waits for the device.

    Raises:
        ValueError: the forward is being captured into a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(device)
        self._window_counter = 0
        self._window_start = _Sizes(0, 0)
        self._window_peak = _Sizes(0, 0)
        self._window_retries = 0
        self._lock = threading.Lock()  # of the window's peak: autograd samples on a thread of its own
        self._next_sample = 0.0
        self._rounding = 1.0
        self._has_advised = False

    def auto_bytes(self) -> int:
        state = read_allocator(self._device)
        return state.reserved_bytes + int(AUTO_LIMIT_SHARE * state.growth_bytes)

    def device_bytes(self) -> int:
        return torch.cuda.get_device_properties(self._device).total_memory

    def in_use_bytes(self) -> int:
        return self._read()[0].allocated_bytes

    def left_bytes(self, limit_bytes: int) -> int:
        """Under the limit, under what other processes leave, under a memory fraction; less what is lost to
        fragmentation, and less what rounding added to the activations of the last window."""
        state = read_allocator(self._device)
        left_bytes = min(limit_bytes - state.allocated_bytes, state.usable_bytes)
        return int(left_bytes / self._rounding) if left_bytes > 0 else left_bytes

    def start_window(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UserError(
                "FlexTrainer cannot manage a forward that is captured into a CUDA graph: its decisions and copies "
                "change from one micro-batch to the next. Train without CUDA graphs, or detach before the capture."
            )
        with self._lock:  # a reading taken before does not end up in this window
            sizes, self._window_counter, self._window_retries = self._read()
            self._window_start = self._window_peak = sizes

    def end_window(self) -> None:
        self._learn_rounding()
        if self._read()[2] > self._window_retries:
            self._advise()

    def sample(self) -> None:
        started = time.monotonic()
        if started >= self._next_sample:
            self._note()
            ended = time.monotonic()
            self._next_sample = ended + max(SAMPLE_SECONDS, (ended - started) / _CUDA_SAMPLE_SHARE)

    def peak_bytes(self) -> int:
        counter = self._note()
        return counter if counter > self._window_counter else self._window_peak.allocated_bytes

    def is_peak_exact(self) -> bool:
        return self._read()[1] > self._window_counter

    def now(self) -> dict[str, int]:
        state = read_allocator(self._device)
        return {
            "allocated": state.allocated_bytes,
            "reserved": state.reserved_bytes,
            "device": state.total_bytes - state.free_bytes,
        }

    def shortage(self, wanted_bytes: int = 0) -> str:
        """Whether the device is full or its memory in pieces, for the message of a failed allocation."""
        return read_allocator(self._device).shortage(wanted_bytes, largest_free_block(self._device))

    def _read(self) -> tuple[_Sizes, int, int]:
        """Sizes now, the counter of the most ever allocated, and the number of retries."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        requested_bytes = stats["requested_bytes"]["all"]["current"] if "requested_bytes" in stats else 0
        return _Sizes(allocated["current"], requested_bytes), allocated["peak"], stats["num_alloc_retries"]

    def _note(self) -> int:
        """Look now; returns the counter of the most ever allocated."""
        with self._lock:
            sizes, counter, _ = self._read()
            if sizes.allocated_bytes > self._window_peak.allocated_bytes:
                self._window_peak = sizes
        return counter

    def _learn_rounding(self) -> None:
        """What the allocator took for this window's activations, over what was asked for: blocks come in steps of 512
        bytes, and large ones keep a rest of up to 1 MiB."""
        allocated_bytes = self._window_peak.allocated_bytes - self._window_start.allocated_bytes
        requested_bytes = self._window_peak.requested_bytes - self._window_start.requested_bytes
        if requested_bytes >= _LEAST_ROUNDED_BYTES:
            self._rounding = min(max(allocated_bytes / requested_bytes, 1.0), _MOST_ROUNDING)

    def _advise(self) -> None:
        """Segments were refused in this window: say once if that was because of fragmentation."""
        state = read_allocator(self._device)
        if self._has_advised or not state.is_fragmented or has_expandable_segments():
            return
        if torch.cuda.get_allocator_backend() != "native":
            return
        self._has_advised = True
        warnings.warn(
            f"memory of {self._device} is fragmented: {format_bytes(state.split_bytes)} of "
            f"{format_bytes(state.reserved_bytes)} reserved bytes lie free between blocks in use; "
            f"{EXPANDABLE_SEGMENTS_ADVICE}.",
            stacklevel=2,
        )


class _Sizes(NamedTuple):
    """Bytes in torch's tensors: as rounded by the allocator, and as asked for."""

    allocated_bytes: int
    requested_bytes: int
