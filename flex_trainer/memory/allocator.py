"""torch's CUDA allocator, read and put into words: full, or fragmented?

The allocator takes *segments* from the driver (in steps of 2 MiB) and cuts *blocks* out of them (in steps of 512
bytes). Every byte of the device is in one of these places:

    allocated        in blocks that tensors own (sizes as rounded; *requested* is what was asked for)
    pending          in blocks that were freed while another stream may still use them: active, not allocated
    split            free, in segments that other blocks keep from being given back: good only for what fits there
    whole            free, in segments of their own: can be given back to the driver and taken again in any size
    growth           not taken from the driver yet, and allowed to be: the device's free memory, or less under a cap

Full means that split and whole bytes and growth are few. Fragmented means that bytes are there, but in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flex_trainer.compat import allocator_settings
from flex_trainer.units import format_bytes

SEGMENT_BYTES = 2 * 2**20
"""What segments are a multiple of (kRoundLarge in torch's allocator)."""
FRAGMENTED_SHARE = 0.1
"""Split bytes beyond this share of the reserved ones are worth a word."""
EXPANDABLE_SEGMENTS_ADVICE = (
    "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before the process starts: segments then grow "
    "in place of new ones being taken"
)


@dataclass(frozen=True)
class AllocatorState:
    """One reading of the allocator of one device. All in bytes, but for the counts."""

    allocated_bytes: int
    requested_bytes: int
    """What the owners of the allocated blocks asked for."""
    active_bytes: int
    reserved_bytes: int
    split_bytes: int
    num_retries: int
    """How often the driver refused a segment, so that all whole segments were given back first."""
    free_bytes: int
    """What the driver has left, for all processes."""
    total_bytes: int
    allowed_bytes: int
    """What this process may reserve: all, or less after `torch.cuda.set_per_process_memory_fraction`."""

    @property
    def growth_bytes(self) -> int:
        """What can still be reserved, in whole segments."""
        room_bytes = max(min(self.free_bytes, self.allowed_bytes - self.reserved_bytes), 0)
        return room_bytes // SEGMENT_BYTES * SEGMENT_BYTES

    @property
    def pending_bytes(self) -> int:
        return max(self.active_bytes - self.allocated_bytes, 0)

    @property
    def whole_bytes(self) -> int:
        return max(self.reserved_bytes - self.active_bytes - self.split_bytes, 0)

    @property
    def usable_bytes(self) -> int:
        """What an allocation of any size may count on. Split bytes are left out: which sizes fit there is not known."""
        return self.growth_bytes + self.whole_bytes

    @property
    def is_fragmented(self) -> bool:
        return self.split_bytes > FRAGMENTED_SHARE * self.reserved_bytes

    @property
    def elsewhere_bytes(self) -> int:
        """Used of the device by other processes, and by this one outside of the allocator (contexts, libraries)."""
        return max(self.total_bytes - self.free_bytes - self.reserved_bytes, 0)

    def shortage(self, wanted_bytes: int = 0, largest_free_bytes: int | None = None) -> str:
        """Why an allocation of `wanted_bytes` (0: unknown) could not be served, in a sentence or two.

        Args:
            largest_free_bytes: the largest free block of the allocator, where it was read.
        """
        idle_bytes = self.split_bytes + self.whole_bytes
        in_pieces = f"{format_bytes(self.split_bytes)} of {format_bytes(self.reserved_bytes)} reserved bytes"
        if largest_free_bytes is not None:
            in_pieces += f" (largest free block: {format_bytes(largest_free_bytes)})"
        if self.usable_bytes < max(wanted_bytes, 1) <= self.usable_bytes + self.split_bytes and self.is_fragmented:
            text = f"fragmented, not full: {in_pieces} are free between blocks in use"
            return text if has_expandable_segments() else f"{text}; {EXPANDABLE_SEGMENTS_ADVICE}"
        text = (
            f"full: {format_bytes(self.allocated_bytes)} allocated, {format_bytes(idle_bytes)} reserved and free, "
            f"{format_bytes(self.growth_bytes)} left to reserve"
        )
        if self.pending_bytes > idle_bytes:
            text += f", {format_bytes(self.pending_bytes)} freed but not released by other streams yet"
        if self.allowed_bytes < self.total_bytes:
            text += f"; this process may reserve {format_bytes(self.allowed_bytes)} (memory fraction)"
        elif self.elsewhere_bytes > self.reserved_bytes:
            text += f"; {format_bytes(self.elsewhere_bytes)} of the device are used outside of this allocator"
        return text


def read_allocator(device: torch.device) -> AllocatorState:
    """Read the allocator of a CUDA device (with an index). Waits for nothing that runs on the device."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return AllocatorState(
        allocated_bytes=_current(stats, "allocated_bytes"),
        requested_bytes=_current(stats, "requested_bytes"),
        active_bytes=_current(stats, "active_bytes"),
        reserved_bytes=_current(stats, "reserved_bytes"),
        split_bytes=_current(stats, "inactive_split_bytes"),
        num_retries=stats["num_alloc_retries"],
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        allowed_bytes=int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes),
    )


def with_index(device: torch.device) -> torch.device:
    """The CUDA device with its number: without one, the current device is meant."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def largest_free_block(device: torch.device) -> int:
    """Bytes of the largest free block. Looks at every block: for error messages only."""
    sizes = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return max(sizes, default=0)


def has_expandable_segments() -> bool:
    """Whether the allocator was told to use expandable segments (environment, or torch's own setting at run time)."""
    return "expandable_segments:true" in allocator_settings().lower().replace(" ", "")


def _current(stats: dict, name: str) -> int:
    """Of all pools together. The cudaMallocAsync backend leaves out what it does not count."""
    return stats.get(name, {}).get("all", {}).get("current", 0)
