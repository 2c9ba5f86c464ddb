"""Records of any run take bounded memory, and nothing that is told of the run is lost with the older ones."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from flex_trainer.records import RunRecords, totals_of
from flex_trainer.reports.html import render_report
from flex_trainer.reports.summary import summarize
from flex_trainer.reports.timeline import make_timeline
from flex_trainer.testing.fake_runtime import GIB_BYTES, LIMIT_BYTES, make_record
from flex_trainer.totals import MAX_SPIKES, Points, Totals


def unusual(number: int):
    """Micro-batch 3 has the highest peak, every seventh is a spike."""
    values = {"peak_bytes": 3 * GIB_BYTES} if number == 3 else {}
    is_spike = number % 7 == 0
    return make_record(
        number,
        **values,
        is_spike=is_spike,
        demand_bytes=(2 + number) * GIB_BYTES if is_spike else 0,
        plan_ms=1.0,
        freed_bytes={"recompute": number},
        exchange_ms=4.0 + number % 5,
        exposed_ms=1.0,
        pair_ms=float(number % 2),
        predicted_pair_ms=float(number % 3),
        predicted_bytes=GIB_BYTES // 2 + number,
    )


def test_a_window_of_the_newest_and_sums_of_all() -> None:
    kept, everything = RunRecords(max_records=10), [unusual(number) for number in range(95)]
    for record in everything:
        kept.append(record)
    assert 10 <= len(kept) < 20 and kept.num_total == 95
    assert kept[-1] is everything[-1] and list(kept) == everything[-len(kept) :] and kept == everything[-len(kept) :]
    assert kept.since(93) == everything[93:] and kept.since(0) == list(kept)
    assert summarize(kept, LIMIT_BYTES) == summarize(everything, LIMIT_BYTES)
    assert make_timeline(kept, 20) == make_timeline(everything, 20)
    assert totals_of(kept) == Totals.of(everything)
    assert kept.spikes_since(0) == [record for record in everything if record.is_spike]
    assert render_report(kept, LIMIT_BYTES, {}) == render_report(everything, LIMIT_BYTES, {})


def test_a_step_that_is_rolled_back_leaves_no_trace_in_the_sums() -> None:
    records = RunRecords([unusual(number) for number in range(8)], max_records=10)
    before = records.totals()
    records.append(make_record(8, peak_bytes=9 * GIB_BYTES))
    assert records.totals().worst is records[-1]
    records.forget_since(8)
    assert records.totals() == before and records.num_total == 8


@pytest.mark.sweep
def test_memory_is_flat_over_many_micro_batches() -> None:
    records = RunRecords(max_records=64)

    def run(first: int, last: int) -> int:
        for number in range(first, last):
            records.append(unusual(number))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        filled = run(0, 30_000)  # all that is bounded is full: spikes, points, step times
        assert run(30_000, 60_000) <= 1.1 * filled
    finally:
        tracemalloc.stop()
    totals = records.totals()
    assert totals.num_micro_batches == 60_000 and totals.num_spikes == -(-60_000 // 7)
    assert totals.worst is not None and totals.worst.micro_batch == 3
    assert len(totals.noteworthy) < 2 * MAX_SPIKES and totals.num_noteworthy == totals.num_spikes + 1
    assert totals.median_step_ms == 200.0
    timeline = make_timeline(records)
    assert len(timeline) <= 480 and (timeline.first[0], timeline.last[-1]) == (0, 59_999)
    assert max(timeline.columns["peak_bytes"]) == 3 * GIB_BYTES


def test_exchanges_and_pairs_are_summed_over_the_run() -> None:
    totals = RunRecords([unusual(number) for number in range(60)], max_records=10).totals()
    assert (totals.exchange_ms, totals.exposed_ms, totals.num_pairs) == (60 * 6.0, 60.0, 30)
    # Of 1 ms, 1 or 2 were predicted, or nothing.
    assert totals.num_pair_errors == 20 and totals.mean_pair_error_percent == 50.0


def test_the_error_of_a_pair_needs_a_pair_and_a_prediction() -> None:
    assert make_record(0, pair_ms=80.0, predicted_pair_ms=100.0).pair_error_percent == 25.0
    assert make_record(0, pair_ms=80.0).pair_error_percent is None
    assert make_record(0, predicted_pair_ms=80.0).pair_error_percent is None


@pytest.mark.parametrize("number", [1, 2, 39, 40, 41, 500, 1000])
def test_points_cover_every_micro_batch_once(number: int) -> None:
    points = Points(max_points=20)
    for index in range(number):
        points.add(unusual(index))
    thinned, group_size = points.thinned(20)
    assert len(thinned) <= 20 and sum(point.num_micro_batches for point in thinned) == number
    assert all(point.num_micro_batches == group_size for point in thinned[:-1])
    assert [point.first for point in thinned] == list(range(0, number, group_size))


def test_the_report_of_a_run_that_forgot_its_beginning(tmp_path: Path) -> None:
    page = render_report(RunRecords([unusual(number) for number in range(95)], max_records=10), LIMIT_BYTES, {})
    assert "3.00 GiB" in page and "micro-batch 3" in page
