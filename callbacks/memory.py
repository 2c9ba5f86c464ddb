"""FlexMemoryCallback: what trackers get to see of FlexTrainer.

Scalars travel in the Trainer's own log call. A callback's `on_log` would be too late for that: trackers are callbacks
too and stand before it in the list. So the Trainer asks `log_values` before it logs, and every tracker gets the values
in the row of the loss, with that row's step. Trackers put `train/` in front of names, as they do with the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from flex_trainer.callbacks.values import FlexLog, Gather, Runtime
from flex_trainer.records import MicroBatchRecord
from flex_trainer.units import format_bytes

logger = logging.getLogger(__name__)

SPIKE_COLUMNS = (
    "step",
    "micro_batch",
    "num_tokens",
    "imbalance",
    "demand_bytes",
    "budget_bytes",
    "predicted_bytes",
    "actual_bytes",
    "peak_bytes",
    "limit_bytes",
    "num_replans",
)
MAX_TABLE_ROWS = 10_000
"""Weights & Biases cuts a logged table here; we cut it ourselves, and keep the worst."""


class FlexMemoryCallback(TrainerCallback):
    """Scalars, a table of spikes at the end, and an alert for a micro-batch over the limit.

    FlexTrainer installs it by default. The table and the alert go to Weights & Biases where `report_to` has "wandb" and
    a run is active; without it an alert is a warning in the log. Only the main process reports.

    Args:
        runtime: the runtime whose records are reported.
        alert_every_steps: at most one alert in so many optimizer steps. Every over-limit micro-batch is counted all the
            same, in `flex/spike/over_limit_total`.

    Raises:
        ValueError: `alert_every_steps` below 1.
    """

    def __init__(self, runtime: Runtime, alert_every_steps: int = 100) -> None:
        if alert_every_steps < 1:
            raise ValueError(f"alert_every_steps={alert_every_steps} must be at least 1; raise it to hear less often")
        self.runtime = runtime
        self.alert_every_steps = alert_every_steps
        self._log = FlexLog(runtime)
        self._next_unchecked = len(runtime.records)
        self._num_unreported = 0
        self._last_alert_step: int | None = None

    def log_values(self, logs: Mapping[str, Any], gather: Gather | None = None) -> dict[str, float]:
        """The values to add to `logs` before the Trainer logs them: none unless it is a row of training (has a loss).

        With several processes every rank calls this (Trainer.log is called on all of them), with
        `gather=accelerate.utils.gather_object`.
        """
        return self._log.values(gather) if "loss" in logs else {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._log.restart(state.log_history if state.global_step > 0 else ())
        self._next_unchecked = len(self.runtime.records)
        self._num_unreported = 0
        self._last_alert_step = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        new_records = self.runtime.records[self._next_unchecked :]
        self._next_unchecked += len(new_records)
        over_limit = [record for record in new_records if record.is_over_limit]
        if not over_limit or not state.is_world_process_zero:
            return
        self._num_unreported += len(over_limit)
        since = None if self._last_alert_step is None else state.global_step - self._last_alert_step
        if since is None or since >= self.alert_every_steps:
            worst = max(over_limit, key=lambda record: record.peak_bytes - record.limit_bytes)
            _alert(args, _alert_text(worst, self._num_unreported))
            self._last_alert_step = state.global_step
            self._num_unreported = 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        run = _wandb_run(args)
        if run is None:
            return
        import wandb

        rows: list[Any] = spike_rows(self._log.run_records)
        table = wandb.Table(columns=list(SPIKE_COLUMNS), data=rows)
        # No explicit step: an offline run drops what comes with a step before its newest one.
        run.log({"flex/spikes": table, "train/global_step": state.global_step})


def spike_rows(records: Sequence[MicroBatchRecord], max_rows: int = MAX_TABLE_ROWS) -> list[list[float]]:
    """The spikes in order, one row of `SPIKE_COLUMNS` each; if more than `max_rows`, those furthest over budget."""
    spikes = [record for record in records if record.is_spike]
    if len(spikes) > max_rows:
        logger.warning("the table of spikes has the %d furthest over budget of %d", max_rows, len(spikes))
        worst_first = sorted(spikes, key=lambda record: record.budget_bytes - record.demand_bytes)
        spikes = sorted(worst_first[:max_rows], key=lambda record: record.micro_batch)
    return [[getattr(record, column) for column in SPIKE_COLUMNS] for record in spikes]


def _alert_text(worst: MicroBatchRecord, num_over_limit: int) -> str:
    which = "1 micro-batch" if num_over_limit == 1 else f"{num_over_limit} micro-batches"
    return (
        f"{which} over the memory limit since the last alert. Worst: micro-batch {worst.micro_batch} of step "
        f"{worst.step}, {worst.num_tokens} tokens, peak {format_bytes(worst.peak_bytes)}, "
        f"limit {format_bytes(worst.limit_bytes)}. "
        "A larger transient_reserve leaves more room."
    )


def _alert(args: TrainingArguments, text: str) -> None:
    run = _wandb_run(args)
    if run is None:
        logger.warning(text)
        return
    # Our own rate limit has spoken already; theirs (a minute per title, also when given 0) must not drop the alert.
    run.alert(title="FlexTrainer: over the memory limit", text=text, level="WARN", wait_duration=1)


def _wandb_run(args: TrainingArguments) -> Any | None:
    """The active Weights & Biases run of a Trainer that reports there. Otherwise wandb is not even imported."""
    report_to = [args.report_to] if isinstance(args.report_to, str) else (args.report_to or [])
    if "wandb" not in report_to:
        return None
    import wandb

    return wandb.run
