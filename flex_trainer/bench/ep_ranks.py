"""One process for each rank, each with limits of its own and, if asked for, on a host of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from flex_trainer.bench.network import Host

_POLL_SECONDS = 0.05
_GRACE_S = 20.0
"""How long the others may take once one rank has failed."""


@dataclass(frozen=True)
class RankResult:
    """How one rank ended."""

    value: Any
    """What its function returned; None when it did not."""
    error: str
    """What it raised, `Type: message`, or how its process ended; empty when it returned."""
    peak_bytes: int
    """Resident peak of the process; 0 when it was killed."""
    stderr: str


def run_ranks(
    function: str,
    arguments: Mapping[str, Any],
    num_ranks: int,
    *,
    hosts: Sequence[Host] | None = None,
    timeout_s: float = 1800.0,
) -> list[RankResult]:
    """Call `function(**arguments)` in one fresh process for each rank; results in the order of ranks.

    `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and one thread for torch are set; the function calls `join_ranks` first. Values
    travel through JSON.

    Args:
        function: `package.module:name`.
        hosts: one for each rank; all on this one, over the loopback interface, when None.
        timeout_s: seconds after which all are killed, and say so in their results.
    """
    with tempfile.TemporaryDirectory(prefix="flex-bench-") as directory:
        folder = Path(directory)
        processes = [
            _start(function, arguments, rank, num_ranks, folder, hosts[rank] if hosts else None)
            for rank in range(num_ranks)
        ]
        try:
            is_timed_out = _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [_result(folder, rank, process.returncode, is_timed_out) for rank, process in enumerate(processes)]


def join_ranks() -> None:
    """In a rank's process: join the gloo group of all ranks."""
    import torch

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['FLEX_BENCH_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=5),
    )


def values_of(results: Sequence[RankResult], what: str) -> list[Any]:
    """The values of all ranks.

    Raises:
        RuntimeError: a rank failed; the message has all errors.
    """
    failed = [f"rank {rank}: {result.error}\n{result.stderr[-2000:]}" for rank, result in enumerate(results)]
    if any(result.error for result in results):
        raise RuntimeError(f"{what} failed: " + "\n".join(failed))
    return [result.value for result in results]


def _start(
    function: str, arguments: Mapping[str, Any], rank: int, num_ranks: int, folder: Path, host: Host | None
) -> subprocess.Popen[bytes]:
    answer = folder / f"answer{rank}.json"
    request = {"function": function, "arguments": dict(arguments), "answer_path": str(answer)}
    command = [sys.executable, "-m", "flex_trainer.testing.processes", json.dumps(request)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "FLEX_BENCH_STORE": str(folder / "store"),
        "GLOO_SOCKET_IFNAME": host.interface if host else "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # limits, peaks and links are those of processes
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (folder / f"err{rank}").open("wb") as err:
        return subprocess.Popen(
            [*(host.prefix if host else []), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Until all have ended, or long enough. Returns whether the time was over."""
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while any(process.poll() is None for process in processes):
        if not has_failed and any(process.poll() not in (None, 0) for process in processes):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return not has_failed
        time.sleep(_POLL_SECONDS)
    return False


def _result(folder: Path, rank: int, exit_code: int, is_timed_out: bool) -> RankResult:
    answer_path = folder / f"answer{rank}.json"
    answer = json.loads(answer_path.read_text()) if answer_path.exists() else {}
    error = answer.get("error", "")
    if not answer:
        error = f"ended with exit code {exit_code}" + (", out of time" if is_timed_out else "")
    stderr = (folder / f"err{rank}").read_text(errors="replace")
    return RankResult(answer.get("value"), error, answer.get("peak_rss_bytes", 0), stderr)
