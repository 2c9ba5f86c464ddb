"""The records as columns that a plot can draw: thinned to groups of micro-batches, never losing a maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from flex_trainer.config import STRATEGIES
from flex_trainer.records import MicroBatchRecord
from flex_trainer.reports.summary import prediction_error_percents

MAX_POINTS = 480
"""More points than this are not told apart at the width of a page."""

MAXIMUM_FIELDS = (
    "num_tokens",
    "imbalance",
    "budget_bytes",
    "predicted_bytes",
    "actual_bytes",
    "demand_bytes",
    "limit_bytes",
    "baseline_bytes",
    "predicted_peak_bytes",
    "peak_bytes",
    "run_ms",
    "predicted_step_ms",
)


@dataclass(frozen=True)
class Timeline:
    """One value per group of consecutive micro-batches in every column; a group is one micro-batch in short runs."""

    first: tuple[int, ...]
    """Number of each group's first micro-batch."""
    last: tuple[int, ...]
    """Number of each group's last micro-batch."""
    group_size: int
    """Micro-batches per group (the last group may be smaller)."""
    columns: dict[str, tuple[float, ...]]
    """By field of `MicroBatchRecord` (bytes, tokens, ratio, ms), the group's maximum; also
    `error_percent` (maximum, 0 where nothing was predicted) and `freed_<strategy>_bytes` (of the micro-batch of the
    group that freed most in all, so that the strategies stacked are what one micro-batch really freed)."""
    is_spike: tuple[bool, ...]
    """Whether the group has a spike in it."""
    is_over_limit: tuple[bool, ...]
    """Whether the group has a peak over the limit in it."""

    def __len__(self) -> int:
        return len(self.first)


def make_timeline(records: Sequence[MicroBatchRecord], max_points: int = MAX_POINTS) -> Timeline:
    """Group `records` (in order of micro-batch) into at most `max_points` equal groups.

    Raises:
        ValueError: `max_points` below 1.
    """
    if max_points < 1:
        raise ValueError(f"max_points={max_points} must be at least 1")
    group_size = max(1, ceil(len(records) / max_points))
    groups = [records[start : start + group_size] for start in range(0, len(records), group_size)]
    columns: dict[str, tuple[float, ...]] = {
        name: tuple(max(getattr(record, name) for record in group) for group in groups) for name in MAXIMUM_FIELDS
    }
    columns["error_percent"] = tuple(max(prediction_error_percents(group), default=0.0) for group in groups)
    most_freed = [max(group, key=lambda record: sum(record.freed_bytes.values())) for group in groups]
    for strategy in STRATEGIES:
        columns[f"freed_{strategy}_bytes"] = tuple(record.freed_bytes.get(strategy, 0) for record in most_freed)
    return Timeline(
        first=tuple(group[0].micro_batch for group in groups),
        last=tuple(group[-1].micro_batch for group in groups),
        group_size=group_size,
        columns=columns,
        is_spike=tuple(any(record.is_spike for record in group) for group in groups),
        is_over_limit=tuple(any(record.is_over_limit for record in group) for group in groups),
    )
