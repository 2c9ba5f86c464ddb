"""The scalars of a log row: what the micro-batches since the last row have shown.

A row of the Trainer covers `logging_steps x gradient_accumulation_steps` micro-batches. Unless a name says mean, count
or total, its value is the largest over those micro-batches, never the last one's: the micro-batch that matters for
memory is the worst one, wherever it stands in the window.

| name | value |
|---|---|
| `flex/memory/peak_gib`, `peak_micro_batch` | measured peak of memory in use, and the micro-batch that had it |
| `flex/memory/predicted_peak_gib` | predicted peak of memory in use |
| `flex/memory/limit_gib`, `baseline_gib` | the limit; memory in use before forward |
| `flex/memory/budget_gib`, `demand_gib` | activation bytes the plan may hold; what keeping everything would hold |
| `flex/memory/predicted_gib`, `actual_gib` | activation bytes at the end of forward, predicted and real |
| `flex/memory/freed_recompute_gib`, `..._offload_gib`, `..._quantize_gib` | activation bytes a strategy did not hold |
| `flex/memory/process_gib` (CPU), `allocated_gib`, `reserved_gib`, `device_gib` (CUDA) | memory now, each by its name |
| `flex/imbalance/max`, `flex/imbalance/mean` | most tokens of one expert over the mean of all experts |
| `flex/plan/time_ms`, `flex/plan/step_percent` | planning time of a micro-batch; its share of all time |
| `flex/plan/replans` | changes of plan after a router, summed |
| `flex/plan/prediction_error_percent`, `..._mean_percent` | error of the predicted activation bytes, worst and mean |
| `flex/time/step_ms`, `predicted_step_ms` | forward and backward, measured (without planning) and predicted, means |
| `flex/time/error_percent`, `error_mean_percent` | error of the predicted time, worst and mean |
| `flex/exchange/ms`, `exposed_ms` | exchanges between ranks; the part in which nothing was computed; means |
| `flex/exchange/hidden_share` | the other part, over all of the exchanges' time: 0 to 1 |
| `flex/spike/count`, `total` | spikes in the window, and in the run |
| `flex/spike/over_limit_count`, `over_limit_total` | micro-batches with a peak over the limit, the same way |
| `flex/retries/count`, `flex/retries/total` | optimizer steps rolled back and retried, the same way |
| `flex/memory/limit_percent` | the measured peak in percent of the limit |
| `flex/memory/peak_rank`, `limit_percent_rank`, `flex/imbalance/max_rank` | several processes: the rank that had it |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flex_trainer.config import STRATEGIES
from flex_trainer.records import MicroBatchRecord, StepRetry
from flex_trainer.reports.ranks import Runtime as RankRuntime
from flex_trainer.reports.summary import hidden_share, plan_percent, prediction_error_percents, time_error_percents

GIB_BYTES = 2**30

Gather = Callable[[list[dict[str, float]]], list[dict[str, float]]]
"""Puts the lists of all ranks behind one another, on every rank, as `accelerate.utils.gather_object` does."""

_SUMMED = frozenset(
    {
        "flex/plan/replans",
        "flex/spike/count",
        "flex/spike/over_limit_count",
        "flex/retries/count",
    }
)
_AVERAGED = frozenset(
    {
        "flex/imbalance/mean",
        "flex/plan/prediction_error_mean_percent",
        "flex/time/step_ms",
        "flex/time/predicted_step_ms",
        "flex/time/error_mean_percent",
        "flex/exchange/ms",
        "flex/exchange/exposed_ms",
    }
)
_RANK_NAMES = {
    "flex/memory/peak_gib": "flex/memory/peak_rank",
    "flex/memory/limit_percent": "flex/memory/limit_percent_rank",
    "flex/imbalance/max": "flex/imbalance/max_rank",
}
"""Largest values that come with the rank that had them."""


class Runtime(RankRuntime, Protocol):
    """What callbacks need of the runtime."""

    def memory_now(self) -> Mapping[str, int]:
        """Bytes in use now by name: `process` on CPU; `allocated`, `reserved`, `device` on CUDA."""
        ...


def flex_logs(
    records: Sequence[MicroBatchRecord], limit_bytes: int, retries: Sequence[StepRetry] = ()
) -> dict[str, float]:
    """The log values of one window of micro-batches, on one rank, without running totals. Empty for no records."""
    if not records:
        return {}
    worst = max(records, key=lambda record: record.peak_bytes)
    sizes_bytes: dict[str, float] = {
        "peak": worst.peak_bytes,
        "predicted_peak": max(record.predicted_peak_bytes for record in records),
        "limit": limit_bytes,
        "baseline": max(record.baseline_bytes for record in records),
        "budget": max(record.budget_bytes for record in records),
        "demand": max(record.demand_bytes for record in records),
        "predicted": max(record.predicted_bytes for record in records),
        "actual": max(record.actual_bytes for record in records),
    }
    for strategy in STRATEGIES:
        sizes_bytes[f"freed_{strategy}"] = max(record.freed_bytes.get(strategy, 0) for record in records)
    logs = _as_gib(sizes_bytes)
    logs["flex/memory/peak_micro_batch"] = worst.micro_batch
    logs["flex/memory/limit_percent"] = 100 * worst.peak_bytes / limit_bytes if limit_bytes else 0.0
    logs["flex/imbalance/max"] = max(record.imbalance for record in records)
    logs["flex/imbalance/mean"] = sum(record.imbalance for record in records) / len(records)
    logs["flex/plan/time_ms"] = max(record.plan_ms for record in records)
    logs["flex/plan/step_percent"] = plan_percent(records)
    logs["flex/plan/replans"] = sum(record.num_replans for record in records)
    errors = prediction_error_percents(records)
    if errors:  # a window of profiling micro-batches has predicted nothing
        logs["flex/plan/prediction_error_percent"] = max(errors)
        logs["flex/plan/prediction_error_mean_percent"] = sum(errors) / len(errors)
    logs["flex/time/step_ms"] = sum(record.run_ms for record in records) / len(records)
    timed = [record for record in records if record.predicted_step_ms > 0]
    time_errors = time_error_percents(timed)
    if time_errors:  # nothing is predicted before the first micro-batch has run
        logs["flex/time/predicted_step_ms"] = sum(record.predicted_step_ms for record in timed) / len(timed)
        logs["flex/time/error_percent"] = max(time_errors)
        logs["flex/time/error_mean_percent"] = sum(time_errors) / len(time_errors)
    exchange_ms = sum(record.exchange_ms for record in records)
    if exchange_ms > 0:
        exposed_ms = sum(record.exposed_ms for record in records)
        logs["flex/exchange/ms"] = exchange_ms / len(records)
        logs["flex/exchange/exposed_ms"] = exposed_ms / len(records)
        logs["flex/exchange/hidden_share"] = hidden_share(exchange_ms, exposed_ms)
    logs["flex/spike/count"] = sum(record.is_spike for record in records)
    logs["flex/spike/over_limit_count"] = sum(record.is_over_limit for record in records)
    logs["flex/retries/count"] = len(retries)
    return logs


def reduce_over_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row from the rows of all ranks, in rank order; empty rows (a rank without micro-batches) are left out.

    Counts are added, means averaged, all else is the largest. `peak_micro_batch` is the one of the rank with the
    highest peak; `hidden_share` is that of the averaged times. `peak_rank`, `limit_percent_rank` and `max_rank` name
    the rank that had the largest peak, share of its limit and imbalance; of several, the first.
    """
    filled = [(rank, row) for rank, row in enumerate(rows) if row]
    if not filled:
        return {}
    reduced: dict[str, float] = {}
    for name in dict.fromkeys(name for _, row in filled for name in row):
        values = [row[name] for _, row in filled if name in row]
        if name in _SUMMED:
            reduced[name] = sum(values)
        elif name in _AVERAGED:
            reduced[name] = sum(values) / len(values)
        else:
            reduced[name] = max(values)
    if len(rows) > 1:
        if "flex/exchange/ms" in reduced:
            times = reduced["flex/exchange/ms"], reduced["flex/exchange/exposed_ms"]
            reduced["flex/exchange/hidden_share"] = hidden_share(*times)
        for name, rank_name in _RANK_NAMES.items():
            worst_rank, worst_row = max(filled, key=lambda pair: pair[1][name])
            reduced[rank_name] = worst_rank
            if name == "flex/memory/peak_gib":
                reduced["flex/memory/peak_micro_batch"] = worst_row["flex/memory/peak_micro_batch"]
    return reduced


class FlexLog:
    """Turns the runtime's records into one row of values per log call.

    Args:
        runtime: its `records` are read from where the last row ended; records made before this object are not its.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._first = self._next = runtime.records.num_total
        self._next_retry = len(runtime.retries)
        self._num_spikes = 0
        self._num_over_limit = 0
        self._num_retries = 0
        self.num_over_limit_elsewhere = 0
        """Micro-batches of other ranks over their limit, in the newest row."""

    def restart(self, log_history: Sequence[Mapping[str, Any]] = ()) -> None:
        """Begin a training run; `log_history` holds the earlier rows of a run that is resumed.

        The totals go on from the newest row, so that a resumed run does not seem to have had fewer spikes. Spikes
        between that row and the checkpoint are in neither, as is the loss of those steps.
        """
        self._first = self._next = self._runtime.records.num_total
        self._next_retry = len(self._runtime.retries)
        self._num_spikes = self._num_over_limit = self._num_retries = 0
        for row in reversed(log_history):
            if "flex/spike/total" in row:
                self._num_spikes = int(row["flex/spike/total"])
                self._num_over_limit = int(row["flex/spike/over_limit_total"])
                self._num_retries = int(row.get("flex/retries/total", 0))
                return

    @property
    def run_spikes(self) -> Sequence[MicroBatchRecord]:
        """The spikes since the run began, as far as they are remembered."""
        return self._runtime.records.spikes_since(self._first)

    def values(self, gather: Gather | None = None) -> dict[str, float]:
        """The values since the last call. Empty when no micro-batch has run since.

        Args:
            gather: given, every rank has to call this, and all get the row of all ranks.
        """
        window = self._runtime.records.since(self._next)
        self._next = self._runtime.records.num_total
        retries = self._runtime.retries[self._next_retry :]
        row = flex_logs(window, self._runtime.limit_bytes, retries)
        if row:
            self._next_retry += len(retries)
            row.update(_as_gib(self._runtime.memory_now()))
        rows = [row] if gather is None else gather([row])
        reduced = reduce_over_ranks(rows)
        self.num_over_limit_elsewhere = 0
        if reduced:
            over_limit = "flex/spike/over_limit_count"
            self.num_over_limit_elsewhere = int(reduced[over_limit] - row.get(over_limit, 0))
            # Totals of reduced counts: every rank resumes from the same history row, and that one has all ranks in it.
            self._num_spikes += int(reduced["flex/spike/count"])
            self._num_over_limit += int(reduced["flex/spike/over_limit_count"])
            self._num_retries += int(reduced["flex/retries/count"])
            reduced["flex/retries/total"] = self._num_retries
            reduced["flex/spike/total"] = self._num_spikes
            reduced["flex/spike/over_limit_total"] = self._num_over_limit
        return reduced


def _as_gib(sizes_bytes: Mapping[str, float]) -> dict[str, float]:
    return {f"flex/memory/{name}_gib": size / GIB_BYTES for name, size in sizes_bytes.items()}
