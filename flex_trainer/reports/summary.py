"""The run in a few numbers, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flex_trainer.records import MicroBatchRecord, StepRetry, totals_of
from flex_trainer.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from flex_trainer.reports.ranks import RankSummary


@dataclass(frozen=True)
class RunSummary:
    """What a run of micro-batches used and did. All sizes in bytes, all times in milliseconds."""

    limit_bytes: int
    """The memory limit."""
    num_micro_batches: int
    """Micro-batches run."""
    peak_bytes: int
    """Highest measured peak of memory in use."""
    peak_micro_batch: int | None
    """The micro-batch that had it; None when none has run."""
    predicted_peak_bytes: int
    """Highest predicted peak of memory in use."""
    num_spikes: int
    """Micro-batches whose keep-all demand was above their budget."""
    num_over_limit: int
    """Micro-batches with a measured peak above the limit."""
    num_retries: int
    """How often an optimizer step was rolled back and retried because an allocation failed."""
    recomputed_bytes: int
    """Activation bytes not held because they were recomputed, summed over micro-batches."""
    offloaded_bytes: int
    """The same for offloading."""
    quantized_bytes: int
    """The same for quantizing."""
    median_step_ms: float
    """Median over optimizer steps of their forward and backward time (all micro-batches of the step)."""
    mean_prediction_error_percent: float | None
    """Mean error of the predicted activation bytes; None when nothing was predicted."""
    plan_percent: float
    """Planning time as a share of forward and backward time."""
    mean_time_error_percent: float | None = None
    """Mean error of the predicted time of a micro-batch; None when nothing was predicted."""
    exchange_ms: float = 0.0
    """Time in which exchanges between ranks were under way, summed over micro-batches."""
    exposed_ms: float = 0.0
    """The part of it in which nothing was computed."""
    num_pairs: int = 0
    """Micro-batches whose forward ran beside the backward of another one."""
    mean_pair_error_percent: float | None = None
    """Mean error of the predicted time of such a pair; None when nothing was predicted."""


def prediction_error_percent(record: MicroBatchRecord) -> float | None:
    """See `MicroBatchRecord.prediction_error_percent`."""
    return record.prediction_error_percent


def prediction_error_percents(records: Sequence[MicroBatchRecord]) -> list[float]:
    """The prediction error of every micro-batch that has one."""
    errors = [prediction_error_percent(record) for record in records]
    return [error for error in errors if error is not None]


def time_error_percents(records: Sequence[MicroBatchRecord]) -> list[float]:
    """The error of the predicted time of every micro-batch that has one (`MicroBatchRecord.time_error_percent`)."""
    errors = [record.time_error_percent for record in records]
    return [error for error in errors if error is not None]


def hidden_share(exchange_ms: float, exposed_ms: float) -> float:
    """Of the time of exchanges, the share in which something was computed meanwhile: 0 to 1; 0 without exchanges."""
    return max(1 - exposed_ms / exchange_ms, 0.0) if exchange_ms > 0 else 0.0


def plan_percent(records: Sequence[MicroBatchRecord]) -> float:
    """Planning time as percent of forward and backward time; 0 when no time was measured."""
    step_ms = sum(record.step_ms for record in records)
    return 100 * sum(record.plan_ms for record in records) / step_ms if step_ms > 0 else 0.0


def summarize(records: Sequence[MicroBatchRecord], limit_bytes: int, retries: Sequence[StepRetry] = ()) -> RunSummary:
    """Sum up the micro-batches of a run; zeros and Nones when there are none."""
    totals = totals_of(records)
    return RunSummary(
        limit_bytes=limit_bytes,
        num_micro_batches=totals.num_micro_batches,
        peak_bytes=totals.worst.peak_bytes if totals.worst else 0,
        peak_micro_batch=totals.worst.micro_batch if totals.worst else None,
        predicted_peak_bytes=totals.predicted_peak_bytes,
        num_spikes=totals.num_spikes,
        num_over_limit=totals.num_over_limit,
        num_retries=len(retries),
        recomputed_bytes=totals.freed_bytes.get("recompute", 0),
        offloaded_bytes=totals.freed_bytes.get("offload", 0),
        quantized_bytes=totals.freed_bytes.get("quantize", 0),
        median_step_ms=totals.median_step_ms,
        mean_prediction_error_percent=totals.mean_error_percent,
        plan_percent=100 * totals.plan_ms / totals.step_ms if totals.step_ms > 0 else 0.0,
        mean_time_error_percent=totals.mean_time_error_percent,
        exchange_ms=totals.exchange_ms,
        exposed_ms=totals.exposed_ms,
        num_pairs=totals.num_pairs,
        mean_pair_error_percent=totals.mean_pair_error_percent,
    )


def summary_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """The summary as (label, value) pairs for a person, in reading order."""
    if summary.num_micro_batches == 0:
        return [("memory limit", format_bytes(summary.limit_bytes)), ("micro-batches", "0 (nothing was trained)")]
    share = f", {100 * summary.peak_bytes / summary.limit_bytes:.1f}% of the limit" if summary.limit_bytes else ""
    error, time_error = summary.mean_prediction_error_percent, summary.mean_time_error_percent
    return [
        ("memory limit", format_bytes(summary.limit_bytes)),
        ("measured peak", f"{format_bytes(summary.peak_bytes)} (micro-batch {summary.peak_micro_batch}{share})"),
        ("predicted peak", format_bytes(summary.predicted_peak_bytes)),
        ("micro-batches", f"{summary.num_micro_batches:,}"),
        ("spikes met", f"{summary.num_spikes:,}"),
        ("over the limit", f"{summary.num_over_limit:,}"),
        ("steps retried", f"{summary.num_retries:,}"),
        ("recomputed", format_bytes(summary.recomputed_bytes)),
        ("offloaded", format_bytes(summary.offloaded_bytes)),
        ("quantized", format_bytes(summary.quantized_bytes)),
        ("median step time", f"{summary.median_step_ms:,.1f} ms"),
        ("mean prediction error", _error(error)),
        ("mean error of predicted time", _error(time_error)),
        ("planning", f"{summary.plan_percent:.2f}% of the step"),
        *_exchange_lines(summary),
    ]


def _exchange_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """Nothing for a run without exchanges and without pairs."""
    lines = []
    if summary.exchange_ms > 0:
        percent = 100 * hidden_share(summary.exchange_ms, summary.exposed_ms)
        time = _duration(summary.exchange_ms)
        lines.append(("exchanges between ranks", f"{time} ({percent:.0f}% of it hidden behind compute)"))
    if summary.num_pairs:
        lines.append(("pairs run together", f"{summary.num_pairs:,} (a forward beside a backward)"))
        lines.append(("mean error of pair time", _error(summary.mean_pair_error_percent)))
    return lines


def _error(percent: float | None) -> str:
    return "nothing predicted" if percent is None else f"{percent:.2f}%"


def _duration(ms: float) -> str:
    return f"{ms / 1e3:,.1f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def summary_table(
    records: Sequence[MicroBatchRecord],
    limit_bytes: int,
    retries: Sequence[StepRetry] = (),
    ranks: Sequence[RankSummary] = (),
) -> Table:
    """The summary as a rich table of two columns, to be printed at the end of a run.

    Args:
        ranks: those of all ranks, from `gather_ranks`; with more than one, the summary is of all.
    """
    from rich.table import Table  # only here: the numbers are wanted also where nothing is printed

    from flex_trainer.reports.ranks import merge_ranks, nearest_line

    summary = merge_ranks(ranks) if len(ranks) > 1 else summarize(records, limit_bytes, retries)
    table = Table(title="FlexTrainer", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for label, value in [*summary_lines(summary), *([nearest_line(ranks)] if len(ranks) > 1 else [])]:
        is_bad = label == "over the limit" and summary.num_over_limit > 0
        table.add_row(label, value, style="bold red" if is_bad else None)
    return table
