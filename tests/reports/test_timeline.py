"""Thinning keeps what matters: the maxima, and every spike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.reports.timeline import MAXIMUM_FIELDS, make_timeline
from flex_trainer.testing.fake_runtime import LIMIT_BYTES, make_record


def test_a_short_run_is_drawn_as_it_is():
    records = [make_record(index, peak_bytes=index) for index in range(5)]
    timeline = make_timeline(records, max_points=5)
    assert timeline.group_size == 1
    assert timeline.first == timeline.last == (0, 1, 2, 3, 4)
    assert timeline.columns["peak_bytes"] == (0, 1, 2, 3, 4)


@given(num_records=st.integers(1, 60), max_points=st.integers(1, 20), worst=st.integers(0, 59))
def test_no_maximum_is_lost(num_records: int, max_points: int, worst: int):
    worst %= num_records
    records = [make_record(index) for index in range(num_records)]
    records[worst] = make_record(
        worst, **{name: 10 * LIMIT_BYTES for name in MAXIMUM_FIELDS if name != "limit_bytes"}, is_spike=True
    )
    timeline = make_timeline(records, max_points)
    assert len(timeline) <= max_points
    (group,) = (index for index, is_spike in enumerate(timeline.is_spike) if is_spike)
    assert timeline.first[group] <= worst <= timeline.last[group]
    assert timeline.is_over_limit[group]
    for name in MAXIMUM_FIELDS:
        assert timeline.columns[name][group] == max(getattr(record, name) for record in records)
    assert timeline.first[0] == 0
    assert timeline.last[-1] == num_records - 1


def test_freed_bytes_of_a_group_are_those_of_one_micro_batch():
    records = [
        make_record(0, freed_bytes={"recompute": 10}),
        make_record(1, freed_bytes={"offload": 12, "recompute": 1}),
    ]
    timeline = make_timeline(records, max_points=1)
    assert timeline.columns["freed_recompute_bytes"] == (1,)
    assert timeline.columns["freed_offload_bytes"] == (12,)


def test_prediction_error_leaves_out_profiling():
    records = [
        make_record(0, predicted_bytes=0, is_profile=True),
        make_record(1, predicted_bytes=90, actual_bytes=100),
    ]
    assert make_timeline(records).columns["error_percent"] == (0.0, pytest.approx(10.0))


def test_times_of_a_group_are_the_largest():
    records = [make_record(0, predicted_step_ms=90.0, plan_ms=5.0), make_record(1, step_ms=80.0)]
    columns = make_timeline(records, max_points=1).columns
    assert (columns["run_ms"], columns["predicted_step_ms"]) == ((95.0,), (90.0,))


def test_exchanges_of_a_group_are_those_of_one_micro_batch():
    records = [make_record(0, exchange_ms=50.0, exposed_ms=45.0), make_record(1, exchange_ms=80.0, exposed_ms=10.0)]
    columns = make_timeline(records, max_points=1).columns
    assert (columns["exposed_ms"], columns["hidden_ms"]) == ((10.0,), (70.0,))
    columns = make_timeline(records).columns
    assert (columns["exposed_ms"], columns["hidden_ms"]) == ((45.0, 10.0), (5.0, 70.0))


def test_no_points_is_refused():
    with pytest.raises(ValueError, match="max_points=0"):
        make_timeline([], max_points=0)
