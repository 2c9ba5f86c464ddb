"""Running sums over micro-batches, and their history thinned to a few hundred points: constant memory in any run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flex_trainer.records import MicroBatchRecord

MAX_POINTS = 480
"""Points of a history that may be twice as long; more are not told apart at the width of a page."""
MAX_SPIKES = 2048
"""Spikes that are remembered whole, those over the limit and furthest over budget first; all are counted."""
_MAX_STEP_TIMES = 4096

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
class Point:
    """One or more consecutive micro-batches: the largest value of each field."""

    first: int
    """Number of the first micro-batch, and of the last."""
    last: int
    num_micro_batches: int
    largest: Mapping[str, float]
    """By the names of `MAXIMUM_FIELDS`."""
    error_percent: float
    freed_bytes: Mapping[str, int]
    """Of the micro-batch that freed most in all."""
    exchange_ms: tuple[float, float]
    """Of the micro-batch whose exchanges took longest: their time, and the exposed part of it."""
    is_spike: bool
    is_over_limit: bool

    @classmethod
    def of(cls, record: MicroBatchRecord) -> Point:
        return cls(
            first=record.micro_batch,
            last=record.micro_batch,
            num_micro_batches=1,
            largest={name: getattr(record, name) for name in MAXIMUM_FIELDS},
            error_percent=record.prediction_error_percent or 0.0,
            freed_bytes=record.freed_bytes,
            exchange_ms=(record.exchange_ms, record.exposed_ms),
            is_spike=record.is_spike,
            is_over_limit=record.is_over_limit,
        )

    def merged(self, later: Point) -> Point:
        """Both as one."""
        return Point(
            first=self.first,
            last=later.last,
            num_micro_batches=self.num_micro_batches + later.num_micro_batches,
            largest={name: max(value, later.largest[name]) for name, value in self.largest.items()},
            error_percent=max(self.error_percent, later.error_percent),
            freed_bytes=max(self.freed_bytes, later.freed_bytes, key=lambda freed: sum(freed.values())),
            exchange_ms=max(self.exchange_ms, later.exchange_ms),
            is_spike=self.is_spike or later.is_spike,
            is_over_limit=self.is_over_limit or later.is_over_limit,
        )


@dataclass
class Points:
    """A history that is thinned as it grows: twice as many micro-batches to a point whenever it is full."""

    max_points: int = MAX_POINTS
    group_size: int = 1
    """Micro-batches to a point; the last point may have fewer."""
    points: list[Point] = field(default_factory=list)

    def add(self, record: MicroBatchRecord) -> None:
        point = Point.of(record)
        if self.points and self.points[-1].num_micro_batches < self.group_size:
            self.points[-1] = self.points[-1].merged(point)
            return
        if len(self.points) == 2 * self.max_points:
            self.points = _merged_by(self.points, 2)
            self.group_size *= 2
        self.points.append(point)

    def thinned(self, max_points: int) -> tuple[list[Point], int]:
        """At most so many points, and how many micro-batches each stands for."""
        factor = max(-(-len(self.points) // max_points), 1)
        return _merged_by(self.points, factor), self.group_size * factor

    def copy(self) -> Points:
        return Points(self.max_points, self.group_size, list(self.points))


def _merged_by(points: list[Point], number: int) -> list[Point]:
    merged: list[Point] = []
    for index, point in enumerate(points):
        if index % number:
            merged[-1] = merged[-1].merged(point)
        else:
            merged.append(point)
    return merged


@dataclass
class Totals:
    """What a run of micro-batches came to. Sizes in bytes, times in milliseconds."""

    num_micro_batches: int = 0
    worst: MicroBatchRecord | None = None
    """The one with the highest measured peak; of several, the first."""
    predicted_peak_bytes: int = 0
    num_spikes: int = 0
    num_over_limit: int = 0
    freed_bytes: dict[str, int] = field(default_factory=dict)
    imbalance: float = 1.0
    plan_ms: float = 0.0
    step_ms: float = 0.0
    num_errors: int = 0
    """Micro-batches that have predicted something, and the sum of their errors."""
    error_percents: float = 0.0
    num_time_errors: int = 0
    """The same of times."""
    time_error_percents: float = 0.0
    exchange_ms: float = 0.0
    """See `MicroBatchRecord.exchange_ms`."""
    exposed_ms: float = 0.0
    num_pairs: int = 0
    """Micro-batches whose forward ran beside a backward."""
    num_pair_errors: int = 0
    """Those of them whose time was predicted, and the sum of the errors."""
    pair_error_percents: float = 0.0
    num_noteworthy: int = 0
    """Spikes, and micro-batches over the limit."""
    noteworthy: list[MicroBatchRecord] = field(default_factory=list)
    """Those, in order; the worst of them where there are more than `MAX_SPIKES`."""
    points: Points = field(default_factory=Points)
    _step: int | None = None
    _ms_of_step: float = 0.0
    _step_times: list[float] = field(default_factory=list)
    _every: int = 1
    _num_steps: int = 0

    @classmethod
    def of(cls, records: Iterable[MicroBatchRecord]) -> Totals:
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: MicroBatchRecord) -> None:
        self.num_micro_batches += 1
        if self.worst is None or record.peak_bytes > self.worst.peak_bytes:
            self.worst = record
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, record.predicted_peak_bytes)
        self.num_spikes += record.is_spike
        self.num_over_limit += record.is_over_limit
        for name, num_bytes in record.freed_bytes.items():
            self.freed_bytes[name] = self.freed_bytes.get(name, 0) + num_bytes
        self.imbalance = max(self.imbalance, record.imbalance)
        self.plan_ms += record.plan_ms
        self.step_ms += record.step_ms
        error = record.prediction_error_percent
        if error is not None:
            self.num_errors += 1
            self.error_percents += error
        time_error = record.time_error_percent
        if time_error is not None:
            self.num_time_errors += 1
            self.time_error_percents += time_error
        self.exchange_ms += record.exchange_ms
        self.exposed_ms += record.exposed_ms
        self.num_pairs += record.pair_ms > 0
        pair_error = record.pair_error_percent
        if pair_error is not None:
            self.num_pair_errors += 1
            self.pair_error_percents += pair_error
        if record.is_spike or record.is_over_limit:
            self._note(record)
        self.points.add(record)
        self._add_time(record)

    @property
    def median_step_ms(self) -> float:
        """Median over optimizer steps of their forward and backward time; in long runs, over every n-th step."""
        last = [] if self._step is None else [self._ms_of_step]
        times = [*self._step_times, *last]
        return median(times) if times else 0.0

    @property
    def mean_error_percent(self) -> float | None:
        return self.error_percents / self.num_errors if self.num_errors else None

    @property
    def mean_time_error_percent(self) -> float | None:
        return self.time_error_percents / self.num_time_errors if self.num_time_errors else None

    @property
    def mean_pair_error_percent(self) -> float | None:
        return self.pair_error_percents / self.num_pair_errors if self.num_pair_errors else None

    def copy(self) -> Totals:
        other = Totals(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        other.freed_bytes, other.noteworthy = dict(self.freed_bytes), list(self.noteworthy)
        other.points, other._step_times = self.points.copy(), list(self._step_times)
        return other

    def _note(self, record: MicroBatchRecord) -> None:
        self.num_noteworthy += 1
        self.noteworthy.append(record)
        if len(self.noteworthy) == 2 * MAX_SPIKES:
            self.noteworthy = worst_of(self.noteworthy, MAX_SPIKES)

    def _add_time(self, record: MicroBatchRecord) -> None:
        if record.step == self._step:
            self._ms_of_step += record.step_ms
            return
        if self._step is not None:
            if self._num_steps % self._every == 0:
                self._step_times.append(self._ms_of_step)
            self._num_steps += 1
            if len(self._step_times) == _MAX_STEP_TIMES:
                del self._step_times[1::2]
                self._every *= 2
        self._step, self._ms_of_step = record.step, record.step_ms


def worst_of(records: list[MicroBatchRecord], number: int) -> list[MicroBatchRecord]:
    """Those over the limit, then those furthest over budget; in order of micro-batch."""
    worst_first = sorted(records, key=lambda record: (not record.is_over_limit, record.room_bytes))
    return sorted(worst_first[:number], key=lambda record: record.micro_batch)
