"""The numbers at the end of a run, worked out by hand for a few micro-batches."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flex_trainer.reports import summarize, summary_lines, summary_table
from flex_trainer.reports.summary import hidden_share
from flex_trainer.testing.fake_runtime import GIB_BYTES, LIMIT_BYTES, make_record


def run_records():
    return [
        make_record(0, is_profile=True, predicted_bytes=0, step_ms=900.0, plan_ms=5.0),
        make_record(1, peak_bytes=3 * GIB_BYTES, is_spike=True, freed_bytes={"recompute": 10, "offload": 5}),
        make_record(2, predicted_bytes=110, actual_bytes=100, predicted_peak_bytes=7, freed_bytes={"quantize": 3}),
        make_record(3, predicted_bytes=70, actual_bytes=100, freed_bytes={"recompute": 1}, is_spike=True),
        make_record(4, step_ms=300.0, plan_ms=0.0, predicted_step_ms=330.0),
    ]


def test_each_number():
    summary = summarize(run_records(), LIMIT_BYTES)
    assert summary.limit_bytes == LIMIT_BYTES
    assert summary.num_micro_batches == 5
    assert (summary.peak_bytes, summary.peak_micro_batch) == (3 * GIB_BYTES, 1)
    assert summary.predicted_peak_bytes == 7
    assert (summary.num_spikes, summary.num_over_limit) == (2, 1)
    assert (summary.recomputed_bytes, summary.offloaded_bytes, summary.quantized_bytes) == (11, 5, 3)
    # Steps of two micro-batches: 1000, 200 and 300 ms.
    assert summary.median_step_ms == 300.0
    # 0, 10, 30 and 0 percent; the profiling micro-batch has predicted nothing.
    assert summary.mean_prediction_error_percent == pytest.approx(10.0)
    assert summary.mean_time_error_percent == pytest.approx(10.0)  # only the last micro-batch predicted its time
    assert summary.plan_percent == pytest.approx(100 * 5 / 1500)


def test_no_records():
    summary = summarize([], LIMIT_BYTES)
    assert summary.num_micro_batches == 0
    assert summary.peak_micro_batch is None
    assert summary.mean_prediction_error_percent is None
    assert "nothing was trained" in printed([])


def test_the_table_says_what_a_person_asks():
    text = printed(run_records())
    for part in (
        "2.00 GiB",
        "3.00 GiB (micro-batch 1, 150.0% of the limit)",
        "spikes met",
        "recomputed",
        "300.0 ms",
        "10.00%",
        "mean error of predicted time",
        "0.33% of the step",
    ):
        assert part in text


def test_exchanges_and_pairs():
    records = [
        make_record(0, exchange_ms=1000.0, exposed_ms=1000.0),
        make_record(1, exchange_ms=3000.0, exposed_ms=200.0, pair_ms=100.0),
        make_record(2, exchange_ms=2000.0, exposed_ms=300.0, pair_ms=200.0, predicted_pair_ms=180.0),
        make_record(3, exchange_ms=2000.0, exposed_ms=100.0, pair_ms=100.0, predicted_pair_ms=130.0),
    ]
    summary = summarize(records, LIMIT_BYTES)
    assert (summary.exchange_ms, summary.exposed_ms, summary.num_pairs) == (8000.0, 1600.0, 3)
    assert summary.mean_pair_error_percent == pytest.approx((10 + 30) / 2)  # of the two that were predicted
    lines = dict(summary_lines(summary))
    assert lines["exchanges between ranks"] == "8.0 s (80% of it hidden behind compute)"
    assert lines["pairs run together"] == "3 (a forward beside a backward)"
    assert lines["mean error of pair time"] == "20.00%"


def test_pairs_of_a_gpu_whose_exchanges_are_not_timed():
    lines = dict(summary_lines(summarize([make_record(0, pair_ms=100.0)], LIMIT_BYTES)))
    assert "exchanges between ranks" not in lines
    assert lines["mean error of pair time"] == "nothing predicted"


def test_a_run_without_exchanges_says_nothing_of_them():
    labels = " ".join(label for label, _ in summary_lines(summarize(run_records(), LIMIT_BYTES)))
    assert "exchange" not in labels and "pair" not in labels


@pytest.mark.parametrize(("exchange_ms", "exposed_ms", "share"), [(0, 0, 0), (10, 0, 1), (10, 4, 0.6), (10, 11, 0)])
def test_the_hidden_share_is_a_share(exchange_ms, exposed_ms, share):
    assert hidden_share(exchange_ms, exposed_ms) == pytest.approx(share)


def printed(records) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(records, LIMIT_BYTES))
    return console.export_text()
