"""What is remembered of a run: its micro-batches, and the steps that were rolled back. Reports, callbacks and other
tools read these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from flex_trainer.totals import Totals


@dataclass(frozen=True)
class MicroBatchRecord:
    """One micro-batch from budget to backward. All sizes in bytes, all times in milliseconds."""

    step: int
    """Optimizer step this micro-batch belongs to, from 0."""
    micro_batch: int
    """Running number of the micro-batch over the whole run, from 0; or the number that a schedule has given it."""
    num_tokens: int
    """Tokens in the micro-batch (batch x sequence, padding included)."""
    imbalance: float
    """Most tokens that one expert of this rank gets / mean of all experts (of all ranks, with expert parallelism); the
    largest over layers. 1.0 for dense models."""
    budget_bytes: int
    """Activation bytes the plan was allowed to hold (Algorithm 1)."""
    predicted_bytes: int
    """Activation bytes the plan was predicted to hold at the end of forward. Where experts are on several ranks: with
    the rows that arrived, known from their counts."""
    actual_bytes: int
    """Activation bytes really held at the end of forward."""
    freed_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes not held because of each strategy: keys recompute, offload, quantize."""
    plan_ms: float = 0.0
    """All time that the planner took: looking sizes up, budget, plan, re-plans, and what it learnt afterwards (the last
    is not in `step_ms`)."""
    trace_ms: float = 0.0
    """Time spent tracing the micro-batch on shapes alone, where its sizes were not known (outside of `step_ms`)."""
    is_spike: bool = False
    """Whether keeping everything would have exceeded the budget."""
    demand_bytes: int = 0
    """Activation bytes that keeping everything would have held."""
    limit_bytes: int = 0
    """The memory limit in force."""
    baseline_bytes: int = 0
    """Memory in use before forward (weights, gradients, optimizer, everything else)."""
    predicted_peak_bytes: int = 0
    """Predicted peak of memory in use over forward and backward; with the same rows, and with what other micro-batches
    held at the time of its backward."""
    peak_bytes: int = 0
    """Measured peak of memory in use over forward and backward (process on CPU, allocated on CUDA). While it waits for
    its backward and others run, what they need is not its own."""
    step_ms: float = 0.0
    """Time of this micro-batch from forward to the end of backward, less the time in which it waited while others ran.
    """
    run_ms: float = 0.0
    """The same without planning and without what lies between both passes: what `predicted_step_ms` is about."""
    predicted_step_ms: float = 0.0
    """Predicted time of forward and backward under the plan, without planning. 0 where nothing was predicted: before
    the first micro-batch has run, and for one that only measures. On CUDA it is time of the device."""
    num_replans: int = 0
    """How often the plan was changed after a router."""
    is_profile: bool = False
    """Whether this micro-batch was run with everything mitigated, to measure what could not be traced beforehand."""
    num_unmanaged: int = 0
    """Saved tensors of kinds the engine leaves alone (subclasses, sparse tensors): kept, and not counted in bytes."""
    part: str = ""
    """The part of the model, where several are managed on this device (pipeline stages)."""
    exchange_ms: float = 0.0
    """Time in which exchanges of its rows were under way between ranks, and gathers of weights where another one took
    turns with it or its stages were timed. With `fuse` on or "auto", where experts are spread by FlexTrainer's
    dispatch, on a CPU."""
    exposed_ms: float = 0.0
    """The part of it in which nothing was computed."""
    pair_ms: float = 0.0
    """Time of its forward together with the backward beside it; 0 where there was none."""
    predicted_pair_ms: float = 0.0
    """The same as predicted; 0 before an order was planned."""

    @property
    def is_over_limit(self) -> bool:
        return self.peak_bytes > self.limit_bytes

    @property
    def room_bytes(self) -> int:
        """What the budget had left had everything been kept; negative in a spike."""
        return self.budget_bytes - self.demand_bytes

    @property
    def prediction_error_percent(self) -> float | None:
        """`100 x |predicted - actual| / actual` of the activation bytes at the end of forward.

        None for a micro-batch that held nothing, or that was run to measure operators: it has predicted nothing.
        """
        if self.is_profile or self.actual_bytes <= 0:
            return None
        return 100 * abs(self.predicted_bytes - self.actual_bytes) / self.actual_bytes

    @property
    def time_error_percent(self) -> float | None:
        """`100 x |predicted - measured| / measured` of the time of forward and backward, without planning. None where
        nothing was predicted."""
        if self.predicted_step_ms <= 0 or self.run_ms <= 0:
            return None
        return 100 * abs(self.predicted_step_ms - self.run_ms) / self.run_ms

    @property
    def pair_error_percent(self) -> float | None:
        """The same of `pair_ms`. None where there was no pair, or none was predicted."""
        if self.predicted_pair_ms <= 0 or self.pair_ms <= 0:
            return None
        return 100 * abs(self.predicted_pair_ms - self.pair_ms) / self.pair_ms


class Span(NamedTuple):
    """When one thing was under way, in milliseconds from the begin of its pair."""

    lane: str
    """forward or backward: what computed; forward exchange or backward exchange: what was on its way for it."""
    name: str
    """Of an exchange: counts, dispatch, combine, gather. Of computing: the exchange that it ended with, or "end"."""
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class PairTimeline:
    """A forward and the backward beside it, on this rank."""

    step: int
    micro_batch: int
    """Whose forward it was."""
    total_ms: float
    spans: tuple[Span, ...]


MAX_RECORDS = 4096
"""The newest records that are always there; up to as many more, until they are given up together."""


class RunRecords(Sequence[MicroBatchRecord]):
    """The newest records of a run, and what all came to: memory that does not grow with the run.

    A sequence of the newest records, `MAX_RECORDS` at least. Older ones are in `totals()`.
    """

    def __init__(self, records: Iterable[MicroBatchRecord] = (), max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._recent: list[MicroBatchRecord] = []
        self._older = Totals()
        for record in records:
            self.append(record)

    @property
    def num_total(self) -> int:
        """Records made, also those that are given up."""
        return self._older.num_micro_batches + len(self._recent)

    def append(self, record: MicroBatchRecord) -> None:
        self._recent.append(record)
        if len(self._recent) == 2 * self._max_records:
            for older in self._recent[: self._max_records]:
                self._older.add(older)
            del self._recent[: self._max_records]

    def since(self, num_records: int) -> list[MicroBatchRecord]:
        """The records after the first `num_records` of the run; without those that are given up."""
        return self._recent[max(num_records - self._older.num_micro_batches, 0) :]

    def spikes_since(self, num_records: int) -> list[MicroBatchRecord]:
        """Spikes after the first `num_records` of the run. Of those given up: the worst, where the run is asked for
        from its beginning; none otherwise."""
        older = self._older.noteworthy if num_records == 0 else ()
        return [record for record in (*older, *self.since(num_records)) if record.is_spike]

    def forget_since(self, num_records: int) -> None:
        """Take back all but the first `num_records` of the run."""
        del self._recent[max(num_records - self._older.num_micro_batches, 0) :]

    def totals(self) -> Totals:
        """What all records of the run come to."""
        totals = self._older.copy()
        for record in self._recent:
            totals.add(record)
        return totals

    @overload
    def __getitem__(self, index: int) -> MicroBatchRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatchRecord]: ...
    def __getitem__(self, index: int | slice) -> MicroBatchRecord | list[MicroBatchRecord]:
        return self._recent[index]

    def __len__(self) -> int:
        return len(self._recent)

    def __iter__(self) -> Iterator[MicroBatchRecord]:
        return iter(self._recent)

    def __eq__(self, other: object) -> bool:
        return self._recent == (other._recent if isinstance(other, RunRecords) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RunRecords({self._recent!r})"


def totals_of(records: Sequence[MicroBatchRecord]) -> Totals:
    """What records come to; of a run's, with those that are given up."""
    return records.totals() if isinstance(records, RunRecords) else Totals.of(records)


@dataclass(frozen=True)
class StepRetry:
    """An optimizer step that was rolled back and retried under a tighter plan, because an allocation failed."""

    step: int
    """Optimizer step, from 0."""
    micro_batch: int
    """Running number of the micro-batch that failed."""
    attempt: int
    """1: with a wider safety margin; 2: under the minimum-memory plan; 0: no allocation has failed, memory is shared
    out among more micro-batches in flight than before."""
    phase: str
    """What was going on: planning, forward, backward, recovery, or begin (no room was left for another forward)."""
    operator: str
    """The operator that was running; in backward, the one whose saved values were used last."""
    requested_bytes: int
    """Bytes that the failed allocation asked for; 0 when it did not say."""
    margin_bytes: int
    """Bytes kept free from now on."""
