"""Real `accelerate launch`: two processes that train, and what happens when one of them fails."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flex_trainer.launch.accelerate import render_accelerate_config
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.testing.ranks import free_port
from flex_trainer.testing.wandb_file import read_wandb_file
from flex_trainer.train import run
from tests.distributed.recipes import DEEPSEEK, QWEN_MODEL

ROOT = Path(__file__).resolve().parents[2]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
RECIPE = (
    QWEN_MODEL
    + """\
data: {name: stdlib, sequence_length: 64, domains: [data], num_eval_samples: 4}
training: {max_steps: 3, per_device_train_batch_size: 2, use_cpu: true, save_strategy: no, logging_steps: 1,
           disable_tqdm: true, eval_strategy: steps, eval_steps: 2}
flex: {memory_limit: 3GiB}
parallel: {fsdp: 2, ep: 2}
report: {html: report.html, to: [wandb]}
"""
)
MOST_SECONDS = 30.0
"""From the failure of a rank to the end of the launch: 2 to 8 seconds on an idle machine. What would not end waits two
minutes (in `launch_jobs`) or half an hour (in a collective)."""
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]  # a launch takes a quarter of a minute on an idle machine


class Launch:
    """`accelerate launch` of a module or script in a directory of its own."""

    def __init__(self, directory: Path, program: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
        config = render_accelerate_config(load_recipe(str(directory / "tiny.yaml")), directory / "launch.yaml")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        command = [*ACCELERATE, "--config_file", str(config), *(options or ("--main_process_port", str(free_port())))]
        self._output = directory / f"output{len(list(directory.glob('output*')))}"
        with self._output.open("w") as file:
            self._process = subprocess.Popen(
                [*command, *([] if program.endswith(".py") else ["-m"]), program, *arguments],
                cwd=directory,
                env=environment,
                stdout=file,
                stderr=file,
            )

    def wait(self) -> tuple[int, str, float]:
        """Exit code, all that was printed, and when it ended."""
        try:
            code = self._process.wait(timeout=240)
        finally:
            self._process.terminate()  # the launcher then ends its processes
        return code, self._output.read_text(), time.time()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path


def test_two_processes_train_and_the_first_reports(directory: Path) -> None:
    code, output, _ = Launch(directory, "flex_trainer.train", "tiny.yaml").wait()
    assert code == 0, output
    # One tracker run, with the values of both ranks, also in the rows after the evaluation.
    files = list((directory / "runs" / "tiny").glob("**/*.wandb"))
    assert len(files) == 1
    rows = [row for row in read_wandb_file(files[0]).history if "train/loss" in row]
    assert [row["train/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/flex/memory/peak_rank"] in (0, 1)
        assert row["train/flex/imbalance/max_rank"] in (0, 1)
        assert row["train/flex/memory/peak_gib"] > 0
    # Summary and report are of both.
    assert output.count("nearest to its limit") == 1
    text = " ".join(output.split())
    assert "micro-batches │ 6 │" in text
    page = (directory / "runs" / "tiny" / "report.html").read_text()
    assert "<h2>Ranks</h2>" in page
    assert re.search(r"rank [01] of 2", page) and re.search(r"rank [01] of 2", text)


@pytest.mark.sweep
def test_accelerate_does_not_shard_on_cpus_and_that_is_said(directory: Path) -> None:
    """FSDP launch settings with use_cpu train as DDP. The losses are those of one process with twice the batch."""
    fsdp = "{fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}"
    settings = f"accelerate: {{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp}}}\n"
    (directory / "tiny.yaml").write_text(DEEPSEEK + settings)
    code, output, _ = Launch(directory, "flex_trainer.train", "tiny.yaml").wait()
    assert code == 0, output
    assert "every process holds the whole model (DDP)" in output
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", output)]
    changes = ["training.per_device_train_batch_size=4", f"training.output_dir={directory / 'one'}"]
    rows = run(load_recipe(str(directory / "tiny.yaml"), changes)).state.log_history
    assert losses == pytest.approx([row["loss"] for row in rows if "loss" in row], rel=1e-3)


@pytest.mark.sweep
def test_a_script_of_ones_own(directory: Path) -> None:
    script = str(ROOT / "examples" / "expert_parallel.py")
    code, output, _ = Launch(directory, script, "--tiny", "--memory-limit", "3GiB", "--output-dir", "out").wait()
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", output)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1
    assert output.count("nearest to its limit") == 1
    assert "<h2>Ranks</h2>" in (directory / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("how", "changes", "told"),
    [
        pytest.param("kill", (), "Signal 9 (SIGKILL)", marks=pytest.mark.sweep),  # quick: tests/launch
        pytest.param(
            "allocate",
            ("flex.enforce_limit=true",),
            "rank 1 of 2 on {host}: RuntimeError: ",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_other(directory: Path, how: str, changes, told: str) -> None:
    time_file = directory / "failed"
    arguments = (how, str(time_file), "tiny.yaml", "report.to=[]", *changes)
    code, output, ended = Launch(directory, "tests.distributed.launch_jobs", *arguments).wait()
    assert code != 0
    assert ended - float(time_file.read_text()) < MOST_SECONDS, output
    assert told.format(host=socket.gethostname()) in output
    assert "rank      : 1 (local_rank: 1)" in output.split("Root Cause")[1]
    assert "rank 0 of 2" not in output  # who is not to blame says nothing


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("fused-backward", "rank 1 of 2 on {host}: ValueError: rank 1 has had enough"),
        ("fused-forward", "rank 1 of 2 on {host}: ValueError: rank 1 has had enough"),
        ("fused-recomputation", "rank 1 of 2 on {host}: ValueError: rank 1 has had enough"),
        ("fused-kill", "Signal 9 (SIGKILL)"),
    ],
)
@pytest.mark.sweep  # quick: tests/steps/test_turns.py
def test_a_rank_that_fails_while_forward_and_backward_run_together(directory: Path, how: str, told: str) -> None:
    time_file = directory / "failed"
    changes = ("report.to=[]", "flex.fuse=true", "training.gradient_accumulation_steps=4")
    code, output, ended = Launch(
        directory, "tests.distributed.launch_jobs", how, str(time_file), "tiny.yaml", *changes
    ).wait()
    assert code != 0
    assert ended - float(time_file.read_text()) < MOST_SECONDS, output
    assert told.format(host=socket.gethostname()) in output
    assert how == "fused-kill" or "in fail_now" in output  # its own traceback
    assert "rank      : 1 (local_rank: 1)" in output.split("Root Cause")[1]
    assert "rank 0 of 2" not in output


@pytest.mark.sweep
def test_a_rank_of_another_machine_ends_too(directory: Path) -> None:
    """Two launchers on this machine stand for two machines. Rank 0 is in no collective when rank 1 fails."""
    time_file, port = directory / "failed", str(free_port())
    arguments = ("raise-while-others-compute", str(time_file), "tiny.yaml", "report.to=[]")
    launches = []
    for machine in ("0", "1"):
        options = ("--num_machines", "2", "--machine_rank", machine)
        options += ("--main_process_ip", "127.0.0.1", "--main_process_port", port)
        launches.append(Launch(directory, "tests.distributed.launch_jobs", *arguments, options=options))
    failed_code, failed_output, _ = launches[1].wait()
    other_code, other_output, ended = launches[0].wait()
    assert failed_code != 0 and other_code != 0
    message = f"rank 1 of 2 on {socket.gethostname()}: ValueError: rank 1 has had enough"
    assert message in failed_output
    assert f"rank 0 of 2 on {socket.gethostname()} ends, since another has failed: {message}" in other_output
    assert ended - float(time_file.read_text()) < MOST_SECONDS, other_output
