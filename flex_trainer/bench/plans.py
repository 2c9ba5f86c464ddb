"""What planning the largest shipped recipes takes: for the benchmark of predictions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LARGE_RECIPES = ("deepseek_v3_256gpu", "glm4_5_256gpu")
_HARDWARE = "h100"


def estimate_figures(recipes: tuple[str, ...] = LARGE_RECIPES) -> dict[str, dict[str, Any]]:
    """Plan every recipe in a process of its own, start of the interpreter included.

    Returns:
        By recipe: `wall_seconds`, `cpu_seconds`, `peak_rss_bytes` of that process, `fits`, and `ratios`: step time of
        the other ways over the plan's, with balanced routing.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    return {name: _figures(name) for name in recipes}


def _figures(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        command = [sys.executable, "-m", "flex_trainer", "plan", name, "--hardware", _HARDWARE, "--json", str(path)]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            # Not process.wait: this also gives what the process used.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall_seconds = time.perf_counter() - start
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        result = json.loads(path.read_text(encoding="utf-8"))
    balanced = result["imbalances"][0]
    ways = [way for way in balanced if isinstance(balanced[way], dict) and way != "plan"]
    return {
        "wall_seconds": wall_seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "fits": result["fits"],
        "ratios": {way: balanced[way]["step_seconds"] / balanced["plan"]["step_seconds"] for way in ways},
    }
