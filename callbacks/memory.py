"""FlexMemoryCallback: what trackers get to see of FlexTrainer.

Scalars travel in the Trainer's own log call. A callback's `on_log` would be too late for that: trackers are callbacks
too and stand before it in the list. So the Trainer asks `log_values` before it logs, and every tracker gets the values
in the row of the loss, with that row's step. Trackers put `train/` in front of names, as they do with the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object
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
    "rank",
)
MAX_TABLE_ROWS = 10_000
"""Weights & Biases cuts a logged table here; we cut it ourselves, and keep the worst."""


class FlexMemoryCallback(TrainerCallback):
    """Scalars, a table of spikes at the end, and an alert for a micro-batch over the limit.

    FlexTrainer installs it by default. The table and the alert go to Weights & Biases where `report_to` has "wandb" and
    a run is active; without it an alert is a warning in the log. Only the main process reports; it alerts about other
    ranks when a row of values tells of them.

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
        self._next_unchecked = runtime.records.num_total
        self._num_unreported = 0
        self._last_alert_step: int | None = None
        self._args: TrainingArguments | None = None
        self._state: TrainerState | None = None

    def log_values(self, logs: Mapping[str, Any], gather: Gather | None = None) -> dict[str, float]:
        """The values to add to `logs` before the Trainer logs them: none unless it is a row of training (has a loss).

        With several processes every rank calls this (Trainer.log is called on all of them), with
        `gather=accelerate.utils.gather_object`.
        """
        if "loss" not in logs:
            return {}
        values = self._log.values(gather)
        if self._log.num_over_limit_elsewhere and self._args is not None and self._state is not None:
            if self._state.is_world_process_zero and self._may_alert(self._state.global_step):
                _alert(self._args, _text_of_others(self._log.num_over_limit_elsewhere, values))
        return values

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._args, self._state = args, state
        self._log.restart(state.log_history if state.global_step > 0 else ())
        self._next_unchecked = self.runtime.records.num_total
        self._num_unreported = 0
        self._last_alert_step = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        new_records = self.runtime.records.since(self._next_unchecked)
        self._next_unchecked = self.runtime.records.num_total
        over_limit = [record for record in new_records if record.is_over_limit]
        if not over_limit or not state.is_world_process_zero:
            return
        self._num_unreported += len(over_limit)
        if self._may_alert(state.global_step):
            worst = max(over_limit, key=lambda record: record.peak_bytes - record.limit_bytes)
            _alert(args, _alert_text(worst, self._num_unreported))
            self._num_unreported = 0

    def _may_alert(self, step: int) -> bool:
        """Whether the last alert is long enough ago; then this one counts as the last."""
        if self._last_alert_step is not None and step - self._last_alert_step < self.alert_every_steps:
            return False
        self._last_alert_step = step
        return True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not _reports_to_wandb(args):
            return
        rows: list[Any] = spike_rows(self._log.run_spikes, rank=args.process_index)
        if args.world_size > 1:
            rows = _worst_rows(gather_object(rows))
        run = _wandb_run(args) if state.is_world_process_zero else None
        if run is None:
            return
        import wandb

        table = wandb.Table(columns=list(SPIKE_COLUMNS), data=rows)
        # No explicit step: an offline run drops what comes with a step before its newest one.
        run.log({"flex/spikes": table, "train/global_step": state.global_step})


def spike_rows(records: Sequence[MicroBatchRecord], max_rows: int = MAX_TABLE_ROWS, rank: int = 0) -> list[list[float]]:
    """The spikes of a rank in order, one row of `SPIKE_COLUMNS` each; if more than `max_rows`, those furthest over
    budget."""
    columns = SPIKE_COLUMNS[:-1]
    spikes = [record for record in records if record.is_spike]
    return _worst_rows([[*(getattr(record, column) for column in columns), rank] for record in spikes], max_rows)


def _worst_rows(rows: list[list[float]], max_rows: int = MAX_TABLE_ROWS) -> list[list[float]]:
    """In order of micro-batch and rank; at most so many, those furthest over budget."""
    if len(rows) > max_rows:
        logger.warning("the table of spikes has the %d furthest over budget of %d", max_rows, len(rows))
        budget, demand = SPIKE_COLUMNS.index("budget_bytes"), SPIKE_COLUMNS.index("demand_bytes")
        rows = sorted(rows, key=lambda row: row[budget] - row[demand])[:max_rows]
    return sorted(rows, key=lambda row: (row[SPIKE_COLUMNS.index("micro_batch")], row[-1]))


def _alert_text(worst: MicroBatchRecord, num_over_limit: int) -> str:
    which = "1 micro-batch" if num_over_limit == 1 else f"{num_over_limit} micro-batches"
    return (
        f"{which} over the memory limit since the last alert. Worst: micro-batch {worst.micro_batch} of step "
        f"{worst.step}, {worst.num_tokens} tokens, peak {format_bytes(worst.peak_bytes)}, "
        f"limit {format_bytes(worst.limit_bytes)}. "
        "A larger transient_reserve leaves more room."
    )


def _text_of_others(num_over_limit: int, values: Mapping[str, float]) -> str:
    which = "1 micro-batch" if num_over_limit == 1 else f"{num_over_limit} micro-batches"
    return (
        f"{which} of other ranks over their memory limit since the last row of values; nearest to its limit was rank "
        f"{values['flex/memory/limit_percent_rank']:.0f} with {values['flex/memory/limit_percent']:.1f}% of it. "
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
    if not _reports_to_wandb(args):
        return None
    import wandb

    return wandb.run


def _reports_to_wandb(args: TrainingArguments) -> bool:
    report_to = [args.report_to] if isinstance(args.report_to, str) else (args.report_to or [])
    return "wandb" in report_to
