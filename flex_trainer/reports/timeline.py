"""The records as columns that a plot can draw: thinned to groups of micro-batches, never losing a maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flex_trainer.config import STRATEGIES
from flex_trainer.records import MicroBatchRecord, totals_of
from flex_trainer.totals import MAX_POINTS, MAXIMUM_FIELDS


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
    group that freed most in all, so that the strategies stacked are what one micro-batch really freed); and, of the
    micro-batch of the group whose exchanges took longest, `exposed_ms` and `hidden_ms`, the rest of their time."""
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
    points, group_size = totals_of(records).points.thinned(max_points)
    columns: dict[str, tuple[float, ...]] = {
        name: tuple(point.largest[name] for point in points) for name in MAXIMUM_FIELDS
    }
    columns["error_percent"] = tuple(point.error_percent for point in points)
    for strategy in STRATEGIES:
        columns[f"freed_{strategy}_bytes"] = tuple(point.freed_bytes.get(strategy, 0) for point in points)
    columns["exposed_ms"] = tuple(point.exchange_ms[1] for point in points)
    columns["hidden_ms"] = tuple(max(point.exchange_ms[0] - point.exchange_ms[1], 0.0) for point in points)
    return Timeline(
        first=tuple(point.first for point in points),
        last=tuple(point.last for point in points),
        group_size=group_size,
        columns=columns,
        is_spike=tuple(point.is_spike for point in points),
        is_over_limit=tuple(point.is_over_limit for point in points),
    )
