"""The examples run as a user starts them: in a process of their own, with `--tiny`, without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_example(name: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), "--tiny", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(directory / "hf")}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100)


def assert_learns(losses: list[float]) -> None:
    assert len(losses) >= 5
    assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.sweep
def test_finetune(tmp_path: Path) -> None:
    result = run_example("finetune.py", tmp_path, "--output-dir", "out", "--memory-limit", "4GiB")
    assert result.returncode == 0, result.stderr
    assert_learns([float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", result.stdout + result.stderr)])
    assert re.search(r"memory limit\s*│\s*4.00 GiB", result.stdout), result.stdout
    assert "FlexTrainer report" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.sweep
def test_accelerate_loop(tmp_path: Path) -> None:
    result = run_example("accelerate_loop.py", tmp_path, "--memory-limit", "4GiB")
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"step (\d+)  loss ([\d.]+)  tokens (\d+) .* of 4.00 GiB", result.stdout)
    assert [int(step) for step, _, _ in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({num_tokens for _, _, num_tokens in rows}) > 4  # lengths vary
    assert_learns([float(loss) for _, loss, _ in rows])


@pytest.mark.sweep
def test_sft_with_trl(tmp_path: Path) -> None:
    result = run_example("sft_with_trl.py", tmp_path, "--output-dir", "out", "--memory-limit", "4GiB")
    assert result.returncode == 0, result.stderr
    assert_learns([float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", result.stdout + result.stderr)])
    assert len(re.findall(r"^micro-batch \d+: .* of 4.00 GiB$", result.stdout, re.MULTILINE)) == 5
    # The example turns checkpointing off itself, so there is no warning.
    assert "gradient checkpointing is on" not in result.stderr
