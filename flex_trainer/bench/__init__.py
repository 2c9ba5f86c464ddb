"""Benchmarks: `flex-trainer bench NAME`. Each returns figures, the bounds they are held against, and which are met."""

from __future__ import annotations

import importlib
import os
import platform
from typing import Any

from flex_trainer.config import nearest
from flex_trainer.errors import UserError

BENCHMARKS = ("step", "planner", "predict", "survive", "ep", "host", "fused")
"""Modules of this package; each has `measure(is_quick)`, which returns figures, bounds and which are met."""


def run(name: str, quick: bool = False, **choices: Any) -> dict[str, Any]:
    """Run a benchmark.

    Args:
        name: one of `BENCHMARKS`.
        quick: few steps of small models: shows that it runs, the figures mean little.
        choices: what part of it to run, for a benchmark that has parts: arguments of its `measure_parts`.

    Returns:
        `{"name", "machine", "figures", "bounds", "meets"}`; the keys of "meets" are the numbers of the requirements.

    Raises:
        ValueError: an unknown name or part, or parts of a benchmark that has none.
    """
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {name!r}; {nearest(name, BENCHMARKS)}")
    module = importlib.import_module(f"{__name__}.{name}")
    if choices and not hasattr(module, "measure_parts"):
        raise UserError(f"benchmark {name!r} runs as a whole; leave out {', '.join(choices)}, or run 'ep'")
    figures, bounds, meets = module.measure_parts(quick, **choices) if choices else module.measure(quick)
    return {"name": name, "machine": machine(), "figures": figures, "bounds": bounds, "meets": meets}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import accelerate
    import psutil
    import torch
    import transformers

    return {
        "processor": platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "num_threads": torch.get_num_threads(),
    }
