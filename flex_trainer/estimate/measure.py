"""Measures this machine: matrix products, memory, copies to the lower tier, quantizing.

Every figure is the best of a few repeats: what the machine can do when nothing disturbs it. Sizes double until the work
takes long enough to be typical of a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from flex_trainer.config import FlexConfig
from flex_trainer.cost.hardware import Attainable, Hardware
from flex_trainer.errors import UserError
from flex_trainer.estimate.machine import MACHINE, as_mapping, knees
from flex_trainer.memory.offloading import OffloadService

_REPEATS = 3
_SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
_QUICK_SIZES, _QUICK_COPY_BYTES = (64, 128), 2**22
_NUM_GROUPS = 8
_NUM_LAUNCHES = 200
_IN_FLIGHT_LIMIT_BYTES = 2**30


def measure_machine(device_name: str | None = None, offload_to: str = "host", *, quick: bool = False) -> dict[str, Any]:
    """Figures of this machine and all single measurements, as plain data.

    Args:
        device_name: cpu or cuda; None: the GPU if there is one.
        offload_to: as `flex.offload_to`.
        quick: small sizes; the figures mean little then.

    Raises:
        ValueError: a device that is not there, an offload directory that cannot be used.
    """
    device = _device(device_name)
    sizes = _QUICK_SIZES if quick else _SIZES[device.type]
    copy_bytes = _QUICK_COPY_BYTES if quick else _COPY_BYTES[device.type]
    measurements = [*_matmuls(device, sizes), *_grouped(device, sizes[-1])]
    peak_flops: dict[str, float] = {}
    for measurement in measurements:
        if measurement["what"] == "matmul":
            dtype = measurement["dtype"]
            peak_flops[dtype] = max(peak_flops.get(dtype, 0.0), measurement["flops_per_second"])
    copy_seconds = _copy(device, copy_bytes)
    memory_bytes_per_second = 2 * copy_bytes / copy_seconds
    measurements.append(
        {"what": "copy", "num_bytes": copy_bytes, "seconds": copy_seconds, "bytes_per_second": memory_bytes_per_second}
    )
    strategies = ("offload", "quantize")
    service = OffloadService(
        FlexConfig(strategies=strategies, offload_to=offload_to), device, limit_bytes=_IN_FLIGHT_LIMIT_BYTES
    )
    rates = service.rates()
    is_gpu = device.type == "cuda"
    host_link = 2 * rates.offload.bytes_per_second
    hardware = Hardware(
        name=MACHINE,
        title=torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} threads",
        memory_bytes=(
            torch.cuda.get_device_properties(device).total_memory if is_gpu else psutil.virtual_memory().total
        ),
        peak_flops=peak_flops,
        memory_bytes_per_second=memory_bytes_per_second,
        host_link_bytes_per_second=host_link,
        # Links to other devices need other devices: not measured, taken to be as fast as the way to the host.
        node_link_bytes_per_second=host_link,
        network_bytes_per_second=host_link,
        devices_per_node=max(torch.cuda.device_count(), 1) if is_gpu else 1,
        attainable=Attainable(1.0, 1.0, 1.0, 1.0),  # the figures are what was reached
        launch_seconds=_launch(device),
        is_gpu=is_gpu,
        offload=rates.offload,
        quantize=rates.quantize,
        runtime_bytes=0 if is_gpu else psutil.Process().memory_info().rss,
    )
    return {"hardware": as_mapping(hardware), "knees": knees(hardware), "measurements": measurements}


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in _SIZES:
        raise UserError(f"--device {name!r} must be cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    return torch.device(name)


def _matmuls(device: torch.device, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Square products; on a GPU float32 with and without TF32."""
    found = []
    kinds = [("float32", torch.float32, False), ("bfloat16", torch.bfloat16, False)]
    if device.type == "cuda":
        kinds.append(("tf32", torch.float32, True))
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype, is_tf32 in kinds:
            torch.backends.cuda.matmul.allow_tf32 = is_tf32
            for size in sizes:
                left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
                out = torch.empty(size, size, dtype=dtype, device=device)
                seconds = _best(device, lambda a=left, b=right, c=out: torch.mm(a, b, out=c))
                found.append(_flops("matmul", name, size, 2.0 * size**3, seconds))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return found


def _grouped(device: torch.device, size: int) -> list[dict[str, Any]]:
    """The experts' product: rows in groups, each with a matrix of its own."""
    rows = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    weights = torch.ones(_NUM_GROUPS, size, size, dtype=torch.bfloat16, device=device)
    step = size // _NUM_GROUPS
    ends = torch.arange(1, _NUM_GROUPS + 1, dtype=torch.int32, device=device) * step
    seconds = _best(device, lambda: torch.nn.functional.grouped_mm(rows, weights, offs=ends))
    return [_flops("grouped_matmul", "bfloat16", size, 2.0 * size**3, seconds)]


def _flops(what: str, dtype: str, size: int, flops: float, seconds: float) -> dict[str, Any]:
    return {"what": what, "dtype": dtype, "size": size, "seconds": seconds, "flops_per_second": flops / seconds}


def _copy(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return _best(device, lambda: target.copy_(source))


def _launch(device: torch.device) -> float:
    """Seconds of an operation with almost nothing to do."""
    one = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(_NUM_LAUNCHES):
            one.add_(1.0)

    return _best(device, many) / _NUM_LAUNCHES


def _best(device: torch.device, work: Callable[[], object]) -> float:
    work()  # the first time is never typical
    times = []
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
