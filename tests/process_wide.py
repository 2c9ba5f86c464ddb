"""What the tests of one process share: what mitigations cost on this machine, and what the imported libraries hold."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from flex_trainer.cost.roofline import Roofline
from flex_trainer.memory import offloading
from flex_trainer.memory.offloading import OffloadService

_measure_overhead, _measure_offload = offloading.recompute_overhead_seconds, OffloadService._measure_offload
_overheads: dict[str, float] = {}
_offloads: dict[tuple[str, Path | None], Roofline] = {}


def _overhead(device: torch.device) -> float:
    if device.type not in _overheads:
        _overheads[device.type] = _measure_overhead(device)
    return _overheads[device.type]


def _offload(service: OffloadService) -> Roofline:
    place = (service._device.type, service._config.offload_directory)
    if place in _offloads:
        return _offloads[place]
    found = _measure_offload(service)
    if service.is_available:  # else the tier could not be used
        _offloads[place] = found
    return found


def share_measured_rates() -> None:
    """What mitigations cost is measured by the first runtime of a process, not by each: a third of a short test."""
    offloading.recompute_overhead_seconds = _overhead
    OffloadService._measure_offload = _offload  # type: ignore[method-assign]


def share() -> None:
    """Once, when a process has imported what its tests need."""
    share_measured_rates()
    keep_libraries_out_of_collections()


def keep_libraries_out_of_collections() -> None:
    """What has been imported stays until the process ends: full collections (each trace makes one) need not walk it.

    What tests make is collected as ever.
    """
    gc.collect()
    gc.freeze()
