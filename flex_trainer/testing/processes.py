"""Run a function in a fresh interpreter: its own memory, its own limits, its own environment.

    result = run_in_subprocess("my_package.jobs:train", {"limit_bytes": 10**9})
    assert result.exit_code == 0 and result.peak_rss_bytes < 10**9

A cap on process memory, and a peak that means something, need a process that starts from nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from flex_trainer.memory.process import process_memory

POLL_SECONDS = 0.01


@dataclass(frozen=True)
class SubprocessResult:
    """What a function did in its own process."""

    value: Any
    """What it returned, through JSON; None when it raised or the process died."""
    exit_code: int
    """0 when it returned, 1 when it raised, minus the signal's number when the process was killed."""
    peak_rss_bytes: int
    """Resident peak of the process."""
    error: str
    """`Type: message` of what it raised, else empty."""
    stdout: str
    stderr: str


def run_in_subprocess(
    function: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> SubprocessResult:
    """Call `function(**arguments)` in a new Python process and wait for it.

    Args:
        function: `package.module:name`, importable from this process's `sys.path`.
        arguments: keyword arguments; they and the returned value go through JSON.
        env: variables to set over those of this process.
        timeout_s: seconds after which the process is killed.

    Raises:
        ValueError: a `function` without a colon.
        TimeoutError: the process took longer than `timeout_s`.
    """
    if function.count(":") != 1:
        raise ValueError(f"function={function!r} must be 'package.module:name'")
    with tempfile.TemporaryDirectory() as directory:
        answer_path, out_path, err_path = (Path(directory) / name for name in ("answer.json", "out", "err"))
        request = {
            "function": function,
            "arguments": dict(arguments or {}),
            "answer_path": str(answer_path),
        }
        command = [sys.executable, "-m", "flex_trainer.testing.processes", json.dumps(request)]
        search_path = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        child_env = {**os.environ, "PYTHONPATH": search_path, **(env or {})}
        with out_path.open("wb") as out, err_path.open("wb") as err:
            exit_code, max_rss_bytes = _run(command, child_env, out, err, timeout_s, function)
        answer = json.loads(answer_path.read_text()) if answer_path.exists() else {}
        return SubprocessResult(
            value=answer.get("value"),
            exit_code=exit_code,
            # The resource usage of a child starts at the peak of the process that forked it, so the child's own
            # reading is the better one. It is missing when the child was killed.
            peak_rss_bytes=answer.get("peak_rss_bytes", max_rss_bytes),
            error=answer.get("error", ""),
            stdout=out_path.read_text(errors="replace"),
            stderr=err_path.read_text(errors="replace"),
        )


def _run(
    command: list[str], env: Mapping[str, str], out: Any, err: Any, timeout_s: float, name: str
) -> tuple[int, int]:
    """Exit code and `ru_maxrss` in bytes of the finished command."""
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise TimeoutError(f"{name} did not finish within timeout_s={timeout_s:g} seconds and was killed")
            time.sleep(POLL_SECONDS)
    except BaseException:
        if process.returncode is None and process.poll() is None:
            process.kill()
            process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _child(request: Mapping[str, Any]) -> int:
    """The other side: call the function, write the answer, say how it went."""
    answer: dict[str, Any] = {}
    try:
        module_name, name = request["function"].split(":")
        answer["value"] = getattr(import_module(module_name), name)(**request["arguments"])
        json.dumps(answer)
        exit_code = 0
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
        exit_code = 1
    # Here the exception and the tensors of its frames are gone, so that even a process at its cap can answer.
    answer["peak_rss_bytes"] = process_memory().peak_rss_bytes
    Path(request["answer_path"]).write_text(json.dumps(answer))
    return exit_code


if __name__ == "__main__":
    raise SystemExit(_child(json.loads(sys.argv[1])))
