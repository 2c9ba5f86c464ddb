"""The values of a log row: which micro-batches they speak of, and how ranks become one row."""

from __future__ import annotations

from flex_trainer.callbacks import FlexLog, FlexMemoryCallback, flex_logs, reduce_over_ranks
from flex_trainer.callbacks.memory import SPIKE_COLUMNS, spike_rows
from flex_trainer.testing.fake_runtime import GIB_BYTES, LIMIT_BYTES, FakeRuntime, make_record


def test_maximum_over_the_window_not_the_last():
    logs = flex_logs([make_record(0, peak_bytes=7), make_record(1, peak_bytes=9), make_record(2, peak_bytes=8)], 10)
    assert logs["flex/memory/peak_gib"] == 9 / GIB_BYTES
    assert logs["flex/memory/peak_micro_batch"] == 1


def test_a_profiling_window_has_no_prediction_error():
    logs = flex_logs([make_record(0, is_profile=True, predicted_bytes=0)], 10)
    assert "flex/plan/prediction_error_percent" not in logs
    assert logs["flex/memory/actual_gib"] == 0.5


def test_each_record_is_in_one_row():
    runtime = FakeRuntime({0: {"is_spike": True}})
    log = FlexLog(runtime)
    runtime.run_one()
    assert log.values()["flex/spike/count"] == 1
    assert log.values() == {}
    runtime.run_one()
    row = log.values()
    assert (row["flex/spike/count"], row["flex/spike/total"]) == (0, 1)


def test_only_rows_of_training_take_values():
    runtime = FakeRuntime()
    callback = FlexMemoryCallback(runtime)
    runtime.run_one()
    assert callback.log_values({"eval_loss": 1.0}) == {}
    assert callback.log_values({"train_loss": 1.0, "train_runtime": 2.0}) == {}
    assert callback.log_values({"loss": 1.0})["flex/memory/peak_gib"] == 1.0


def test_cuda_memory_has_three_names():
    runtime = FakeRuntime(memory_bytes={"allocated": GIB_BYTES, "reserved": 2 * GIB_BYTES, "device": 3 * GIB_BYTES})
    log = FlexLog(runtime)
    runtime.run_one()
    row = log.values()
    assert [row[f"flex/memory/{name}_gib"] for name in ("allocated", "reserved", "device")] == [1.0, 2.0, 3.0]
    assert "flex/memory/process_gib" not in row


def test_ranks_are_reduced_with_the_rank_of_the_peak():
    here = flex_logs([make_record(0, is_spike=True, imbalance=1.0)], LIMIT_BYTES)
    there = flex_logs([make_record(5, is_spike=True, imbalance=3.0, peak_bytes=3 * GIB_BYTES)], LIMIT_BYTES)
    runtime = FakeRuntime({0: {"is_spike": True, "imbalance": 1.0}})
    log = FlexLog(runtime)
    runtime.run_one()
    row = log.values(gather=lambda rows: [*rows, {}, there])
    assert row["flex/memory/peak_gib"] == 3.0
    assert row["flex/memory/peak_micro_batch"] == 5
    assert row["flex/memory/peak_rank"] == row["flex/memory/limit_percent_rank"] == row["flex/imbalance/max_rank"] == 2
    assert row["flex/memory/limit_percent"] == 100 * 3 * GIB_BYTES / LIMIT_BYTES
    assert log.num_over_limit_elsewhere == 1
    assert row["flex/imbalance/max"] == 3.0
    assert row["flex/imbalance/mean"] == 2.0
    assert row["flex/spike/count"] == row["flex/spike/total"] == 2
    assert row["flex/spike/over_limit_total"] == 1
    assert reduce_over_ranks([here]) == here
    assert reduce_over_ranks([{}, {}]) == {}


def test_exchanges_are_means_and_their_share_is_of_all_of_them():
    records = [make_record(0, exchange_ms=10.0, exposed_ms=10.0), make_record(1, exchange_ms=70.0, exposed_ms=10.0)]
    here = flex_logs(records, LIMIT_BYTES)
    assert (here["flex/exchange/ms"], here["flex/exchange/exposed_ms"]) == (40.0, 10.0)
    assert here["flex/exchange/hidden_share"] == 0.75  # not the mean of 0 and 6/7
    there = flex_logs([make_record(0, exchange_ms=120.0, exposed_ms=70.0)], LIMIT_BYTES)
    nowhere = flex_logs([make_record(0)], LIMIT_BYTES)
    assert not any(name.startswith("flex/exchange") for name in nowhere)
    row = reduce_over_ranks([here, {}, nowhere, there])
    assert (row["flex/exchange/ms"], row["flex/exchange/exposed_ms"]) == (80.0, 40.0)
    assert row["flex/exchange/hidden_share"] == 0.5
    assert not any(name.startswith("flex/exchange") for name in reduce_over_ranks([nowhere, nowhere]))
    assert reduce_over_ranks([here]) == here


def test_a_long_table_keeps_the_worst_in_order():
    records = [make_record(index, is_spike=True, demand_bytes=index % 7 * GIB_BYTES) for index in range(21)]
    rows = spike_rows(records, max_rows=6)
    micro_batches = [row[SPIKE_COLUMNS.index("micro_batch")] for row in rows]
    assert micro_batches == [5, 6, 12, 13, 19, 20]
