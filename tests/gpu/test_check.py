"""The check for machines with a GPU: as a whole where there is one, and the script itself on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_check(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, result and lines of the script in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/gpu/check.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; python tests/gpu/check.py --device cuda")
@pytest.mark.timeout(600)
def test_on_the_gpu() -> None:
    exit_code, result, lines = run_check()
    assert exit_code == 0, lines
    assert set(result["checks"].values()) == {"PASS"}, lines


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_the_script_on_a_cpu() -> None:
    exit_code, result, lines = run_check("--device", "cpu", "--quick")
    assert exit_code == 0, lines
    outcome = {name: text[:4] for name, text in result["checks"].items()}
    assert outcome == {
        "equality": "PASS",
        "limit": "PASS",
        "cap": "SKIP",
        "pinned_bound": "SKIP",
        "leak": "PASS",
        "overlap": "SKIP",
        "waits": "SKIP",
        "bench": "PASS",
    }
    figures = result["figures"]
    assert set(figures["step_s"]) == {"plain", "checkpointing", "flex_ample", "flex_at_limit"}
    assert 0 < figures["peak_mib_under_limit"] <= figures["limit_mib"]
    assert figures["left_bytes"] == 0 and figures["noise of plain, fp32"] == 0


def run_fused_check(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """The same of the script for two ranks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(ROOT / "tests/gpu/check_fused.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; torchrun tests/gpu/check_fused.py")
@pytest.mark.timeout(900)
def test_fused_on_two_gpus() -> None:
    exit_code, result, lines = run_fused_check()
    assert exit_code == 0 and result["num_failed"] == 0, lines


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_the_script_for_two_gpus_on_a_cpu() -> None:
    exit_code, result, lines = run_fused_check("--device", "cpu", "--quick")
    assert exit_code == 0, lines
    assert lines.count("PASS") == 2 and result["num_failed"] == 0
    assert set(result["step_s"]) == {"sequential", "auto", "fused"} and result["fused_ratio"] > 0


@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    exit_code, _, lines = run_check()
    assert exit_code == 2 and "no CUDA device here" in lines
