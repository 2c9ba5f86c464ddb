"""Memory in use, on the device that holds the activations, each kind under its own name.

CPU    *process*: resident memory of this process. Where a hard limit on the process's data (RLIMIT_DATA) is nearer than
       the memory limit, that one counts.
CUDA   *allocated*: bytes in torch's tensors; *reserved*: what torch's allocator holds; *device*: what all processes use
       of the card. Plans are made in allocated bytes. See `allocator.py` for what lies between the three.

Shared counters (CUDA's peak, the kernel's high-water mark) are read, never reset: they may belong to another
measurement. A peak inside a window is therefore the counter's value where it rose in the window, else the highest
sample.
"""

from __future__ import annotations

from typing import Protocol

import torch

from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError

SAMPLE_SECONDS = 0.001
"""Samples come at least this far apart: operators may follow one another every few microseconds."""


class MemoryMeter(Protocol):
    """Reads memory in use. A window spans one micro-batch; samples inside it are cheap."""

    def auto_bytes(self) -> int:
        """What "auto" takes as the limit: all that this process may use of the device."""
        ...

    def device_bytes(self) -> int:
        """All memory of the device (CPU: of the machine or the control group, whichever is less, over its ranks)."""
        ...

    def in_use_bytes(self) -> int:
        """Memory in use now, as plans count it."""
        ...

    def left_bytes(self, limit_bytes: int) -> int:
        """How much more may be used under the limit, and under any harder one."""
        ...

    def start_window(self) -> None: ...

    def end_window(self) -> None: ...

    def sample(self) -> None:
        """Note memory in use now."""
        ...

    def peak_bytes(self) -> int:
        """Highest memory in use since the window started."""
        ...

    def is_peak_exact(self) -> bool:
        """Whether the window's peak is known, and not only a lower bound."""
        ...

    def now(self) -> dict[str, int]:
        """Memory in use now, by name."""
        ...

    def shortage(self, wanted_bytes: int = 0) -> str:
        """Why an allocation of `wanted_bytes` (0: unknown) has just failed, as the device's allocator knows; "" where
        it knows nothing."""
        ...


def limit_bytes(config: FlexConfig, meter: MemoryMeter) -> int:
    """The memory limit of a config on the meter's device."""
    return config.limit_bytes(meter.device_bytes(), meter.auto_bytes())


def meter_for(device: torch.device) -> MemoryMeter:
    """The meter of a device type.

    Raises:
        ValueError: neither CPU nor CUDA.
    """
    from flex_trainer.memory.cuda_meter import CudaMeter
    from flex_trainer.memory.process_meter import ProcessMeter

    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ProcessMeter()
    raise UserError(f"FlexTrainer can measure memory on cpu and cuda devices, not on {device.type!r}")
