"""What trackers really have after a run: read back from the files that wandb and TensorBoard wrote."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from flex_trainer.callbacks import FlexMemoryCallback, FlexProgressCallback, use_flex_progress
from flex_trainer.callbacks.memory import SPIKE_COLUMNS
from flex_trainer.testing.fake_runtime import GIB_BYTES, FakeRuntime
from flex_trainer.testing.wandb_file import WandbRun, read_wandb_file


class LoggingTrainer(Trainer):
    """Merges the values into the row of the loss, as FlexTrainer does."""

    def __init__(self, *args: Any, runtime: FakeRuntime, alert_every_steps: int = 100, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime
        self.flex_callback = FlexMemoryCallback(runtime, alert_every_steps=alert_every_steps)
        self.add_callback(self.flex_callback)
        self.has_bar = use_flex_progress(self, runtime)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.runtime.run_one()
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs.update(self.flex_callback.log_values(logs, gather=gather_object))
        super().log(logs, start_time)


def make_trainer(
    tmp_path: Path, runtime: FakeRuntime, alert_every_steps: int = 100, **arguments: Any
) -> LoggingTrainer:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    tokens = list(range(8))
    dataset: Any = [{"input_ids": tokens, "labels": tokens}] * 64
    defaults: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return LoggingTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(**(defaults | arguments)),
        train_dataset=dataset,
        eval_dataset=dataset[:2],
        runtime=runtime,
        alert_every_steps=alert_every_steps,
    )


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs of this test go to files in `tmp_path`; a call finishes the run and reads them back."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    wandb.teardown()  # the settings of an earlier run in this process, which are read once

    def read_back() -> WandbRun:
        wandb.finish()
        wandb.teardown()  # the writer is a process of its own; its file is whole when it has ended
        (run_file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")  # one run, not several
        return read_wandb_file(run_file)

    yield read_back
    wandb.teardown()


def rows_with(history: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in history if name in row]


class TestWandb:
    def test_values_table_and_alert_are_in_the_run_file(self, tmp_path, offline_wandb):
        # Step 2 (micro-batches 2, 3): the first of the two has the peak, and is over the limit.
        unusual = {
            2: {"peak_bytes": 3 * GIB_BYTES, "is_spike": True, "demand_bytes": 5 * GIB_BYTES, "imbalance": 4.0},
            3: {"predicted_bytes": GIB_BYTES, "actual_bytes": GIB_BYTES * 4 // 5, "plan_ms": 2.0, "num_replans": 3},
            4: {"predicted_step_ms": 120.0},
            5: {"predicted_step_ms": 90.0, "plan_ms": 10.0},
            6: {"is_spike": True, "freed_bytes": {"recompute": GIB_BYTES, "offload": GIB_BYTES // 2}},
        }
        trainer = make_trainer(tmp_path, FakeRuntime(unusual), report_to=["wandb"])
        trainer.train()
        run = offline_wandb()

        rows = run.rows_with("train/loss")
        assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4]
        second = {name.removeprefix("train/flex/"): value for name, value in rows[1].items()}
        assert second["memory/peak_gib"] == 3.0
        assert second["memory/peak_micro_batch"] == 2
        assert second["memory/limit_gib"] == 2.0
        assert second["memory/budget_gib"] == 1.0
        assert second["memory/demand_gib"] == 5.0
        assert second["memory/process_gib"] == 0.25
        assert second["imbalance/max"] == 4.0
        assert second["imbalance/mean"] == 2.75
        assert second["plan/time_ms"] == 2.0
        assert second["plan/step_percent"] == 1.0
        assert second["plan/replans"] == 3
        assert second["plan/prediction_error_percent"] == pytest.approx(25.0)
        assert second["plan/prediction_error_mean_percent"] == pytest.approx(12.5)
        assert "time/predicted_step_ms" not in second and second["time/step_ms"] == 99.0
        third = {name.removeprefix("train/flex/"): value for name, value in rows[2].items()}
        assert (third["time/step_ms"], third["time/predicted_step_ms"]) == (95.0, 105.0)
        assert (third["time/error_percent"], third["time/error_mean_percent"]) == (20.0, 10.0)
        assert second["spike/count"] == 1
        assert second["spike/over_limit_count"] == 1
        assert [row["train/flex/spike/total"] for row in rows] == [0, 1, 1, 2]
        assert rows[3]["train/flex/memory/freed_recompute_gib"] == 1.0
        assert rows[3]["train/flex/memory/freed_offload_gib"] == 0.5

        (table_row,) = run.rows_with("flex/spikes")
        assert table_row["flex/spikes"]["_type"] == "table-file"
        assert (table_row["flex/spikes"]["nrows"], table_row["flex/spikes"]["ncols"]) == (2, len(SPIKE_COLUMNS))
        assert run.summary["flex/spikes"]["nrows"] == 2
        (table_file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/flex/*.table.json")
        content = json.loads(table_file.read_text())
        assert content["columns"] == list(SPIKE_COLUMNS)
        assert [row[:2] for row in content["data"]] == [[1, 2], [3, 6]]
        assert content["data"][0][SPIKE_COLUMNS.index("demand_bytes")] == 5 * GIB_BYTES

        (alert,) = run.alerts
        assert "micro-batch 2 of step 1" in alert
        assert "peak 3.00 GiB" in alert
        assert "limit 2.00 GiB" in alert

    def test_no_value_is_lost_after_evaluation_and_the_final_rows(self, tmp_path, offline_wandb):
        trainer = make_trainer(
            tmp_path, FakeRuntime({7: {"is_spike": True}}), report_to=["wandb"], eval_strategy="steps", eval_steps=1
        )
        trainer.train()
        run = offline_wandb()

        evaluations = run.rows_with("eval/loss")
        training = run.rows_with("train/flex/memory/peak_gib")
        assert [row["train/global_step"] for row in training] == [1, 2, 3, 4]
        assert [row["train/global_step"] for row in evaluations] == [1, 2, 3, 4]
        assert all("train/loss" in row for row in training)
        assert not any("flex/" in name for row in evaluations for name in row)
        assert training[-1]["train/flex/spike/count"] == 1
        steps = [row["_step"] for row in run.history]
        assert steps == sorted(set(steps))  # wandb drops a row that goes back
        assert run.rows_with("flex/spikes")[0]["flex/spikes"]["nrows"] == 1

    @pytest.mark.sweep
    def test_wandb_is_not_imported_without_report_to(self, tmp_path):
        program = (
            "import sys; from transformers import TrainingArguments\n"
            "from flex_trainer.callbacks.memory import _wandb_run\n"
            f"args = TrainingArguments(output_dir={str(tmp_path)!r}, report_to=['tensorboard'])\n"
            "assert _wandb_run(args) is None and 'wandb' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


class TestResume:
    def test_values_and_totals_go_on(self, tmp_path):
        first = make_trainer(tmp_path, FakeRuntime({1: {"is_spike": True}}), save_strategy="steps", save_steps=2)
        first.args.max_steps = 2
        first.train()
        resumed = make_trainer(tmp_path, FakeRuntime({0: {"is_spike": True}, 2: {"peak_bytes": 3 * GIB_BYTES}}))
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))

        rows = rows_with(resumed.state.log_history, "loss")
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert [row["flex/spike/total"] for row in rows] == [1, 1, 2, 2]
        assert [row["flex/spike/over_limit_total"] for row in rows] == [0, 0, 0, 1]
        assert [row["flex/memory/peak_gib"] for row in rows] == [1.0, 1.0, 1.0, 3.0]

    def test_a_second_training_of_the_same_trainer_starts_from_zero(self, tmp_path):
        trainer = make_trainer(tmp_path, FakeRuntime({1: {"is_spike": True}, 8: {"is_spike": True}}))
        trainer.train()
        trainer.train()
        assert rows_with(trainer.state.log_history, "loss")[-1]["flex/spike/total"] == 1


def test_tensorboard_has_the_same_scalars(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    runtime = FakeRuntime({2: {"peak_bytes": 3 * GIB_BYTES, "is_spike": True}})
    trainer = make_trainer(tmp_path, runtime, report_to=["tensorboard"], eval_strategy="steps", eval_steps=2)
    trainer.train()

    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    peaks = events.Scalars("train/flex/memory/peak_gib")
    assert [(event.step, event.value) for event in peaks] == [(1, 1.0), (2, 3.0), (3, 1.0), (4, 1.0)]
    logged = rows_with(trainer.state.log_history, "loss")
    flex_names = [name for name in logged[0] if name.startswith("flex/")]
    assert len(flex_names) > 20
    for name in flex_names:
        values = [event.value for event in events.Scalars(f"train/{name}")]
        assert values == pytest.approx([row[name] for row in logged]), name


class TestAlerts:
    def test_a_warning_without_wandb_and_at_most_one_in_n_steps(self, tmp_path, caplog):
        over = {"peak_bytes": 3 * GIB_BYTES}
        trainer = make_trainer(
            tmp_path, FakeRuntime(dict.fromkeys(range(8), over)), alert_every_steps=3, logging_steps=4
        )
        with caplog.at_level(logging.WARNING, logger="flex_trainer.callbacks.memory"):
            trainer.train()
        messages = [record.getMessage() for record in caplog.records if "over the memory limit" in record.getMessage()]
        # Steps 1 and 4 of four; the second one speaks for the six micro-batches of steps 2 to 4.
        assert len(messages) == 2
        assert messages[0].startswith("2 micro-batches")
        assert messages[1].startswith("6 micro-batches")
        (row,) = rows_with(trainer.state.log_history, "loss")
        assert row["flex/spike/over_limit_count"] == row["flex/spike/over_limit_total"] == 8

    def test_other_processes_are_silent(self, tmp_path, caplog):
        trainer = make_trainer(tmp_path, FakeRuntime({0: {"peak_bytes": 3 * GIB_BYTES}}))
        trainer.state.is_world_process_zero = False
        trainer.runtime.run_one()
        with caplog.at_level(logging.WARNING, logger="flex_trainer.callbacks.memory"):
            trainer.flex_callback.on_step_end(trainer.args, trainer.state, trainer.control)
        assert not caplog.records

    def test_interval_below_one_is_refused(self):
        with pytest.raises(ValueError, match="alert_every_steps=0 must be at least 1"):
            FlexMemoryCallback(FakeRuntime(), alert_every_steps=0)


class TestProgress:
    def test_the_bar_shows_memory_and_not_the_flex_values(self, tmp_path, capsys):
        runtime = FakeRuntime({3: {"peak_bytes": GIB_BYTES * 3 // 2, "is_spike": True}})
        trainer = make_trainer(tmp_path, runtime, disable_tqdm=False)
        assert trainer.has_bar
        postfixes: list[str] = []
        (bar,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, FlexProgressCallback))

        class Watch(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                assert bar.training_bar is not None
                postfixes.append(bar.training_bar.postfix)

        trainer.add_callback(Watch)
        trainer.train()
        assert postfixes[0] == "mem peak 1.00/2.00 GiB, spikes 0"
        assert postfixes[-1] == "mem peak 1.50/2.00 GiB, spikes 1"
        output = "".join(capsys.readouterr())
        assert "'loss'" in output
        assert "flex/" not in output

    def test_a_printer_stays(self, tmp_path):
        assert not make_trainer(tmp_path, FakeRuntime()).has_bar
