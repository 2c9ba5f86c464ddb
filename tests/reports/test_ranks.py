"""Reports of a run on several ranks."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from flex_trainer.reports import RankSummary, gather_ranks, rank_table, render_report, summarize, summary_table
from flex_trainer.reports.ranks import MAX_RANK_ROWS, merge_ranks, nearest_to_limit
from flex_trainer.testing.fake_runtime import GIB_BYTES, FakeRuntime, make_record

LIMIT_BYTES = 4 * GIB_BYTES


def rank(number: int, peak_bytes: int, limit_bytes: int = LIMIT_BYTES, **values: object) -> RankSummary:
    records = [make_record(index, peak_bytes=peak_bytes, limit_bytes=limit_bytes, **values) for index in range(2)]
    return RankSummary(number, f"host-{number // 2}", summarize(records, limit_bytes), imbalance=1.0 + number)


RANKS = [
    rank(0, 2 * GIB_BYTES),
    rank(1, 3 * GIB_BYTES, is_spike=True),
    rank(2, 2 * GIB_BYTES, limit_bytes=GIB_BYTES * 9 // 4),
]


def text_of(*parts: object) -> str:
    console = Console(file=StringIO(), width=200)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_nearest_is_the_one_with_the_largest_share_of_its_own_limit() -> None:
    assert nearest_to_limit(RANKS).rank == 2
    assert RANKS[2].limit_share > RANKS[1].limit_share == 0.75


def test_a_merged_summary_adds_counts_and_takes_the_peak_of_the_nearest() -> None:
    merged = merge_ranks(RANKS)
    assert (merged.num_micro_batches, merged.num_spikes) == (6, 2)
    assert (merged.peak_bytes, merged.limit_bytes) == (2 * GIB_BYTES, GIB_BYTES * 9 // 4)
    assert merge_ranks(RANKS[:1]) == RANKS[0].summary


def test_exchanges_are_those_of_the_rank_where_they_took_longest() -> None:
    merged = merge_ranks(
        [
            rank(0, GIB_BYTES, exchange_ms=50.0, exposed_ms=40.0, pair_ms=10.0, predicted_pair_ms=11.0),
            rank(1, GIB_BYTES, exchange_ms=90.0, exposed_ms=30.0, pair_ms=10.0, predicted_pair_ms=13.0),
            rank(2, GIB_BYTES, pair_ms=10.0),
        ]
    )
    assert (merged.exchange_ms, merged.exposed_ms) == (180.0, 60.0)
    assert merged.num_pairs == 6
    assert merged.mean_pair_error_percent is not None and round(merged.mean_pair_error_percent) == 20


def test_tables_of_the_terminal() -> None:
    text = text_of(summary_table([], LIMIT_BYTES, (), RANKS), rank_table(RANKS))
    assert "rank 2 of 3 (host-1)" in text
    assert "75.0%" in text and "88.9%" in text
    alone = text_of(summary_table([make_record(0)], LIMIT_BYTES, (), RANKS[:1]))
    assert "nearest to its limit" not in alone


def test_many_ranks_are_cut_to_those_nearest_to_their_limits() -> None:
    ranks = [rank(number, GIB_BYTES + number) for number in range(MAX_RANK_ROWS + 8)]
    table = rank_table(ranks)
    assert table.row_count == MAX_RANK_ROWS
    assert table.title == f"The {MAX_RANK_ROWS} of {MAX_RANK_ROWS + 8} ranks nearest to their limits"
    assert list(table.columns[0].cells)[0] == "8"


def test_the_page_has_a_row_for_each_rank() -> None:
    page = render_report([make_record(0)], LIMIT_BYTES, {}, (), RANKS)
    assert "<h2>Ranks</h2>" in page and page.count("<td>host-") == 3
    assert "rank 2 of 3" in page
    assert "<h2>Ranks</h2>" not in render_report([make_record(0)], LIMIT_BYTES, {}, (), RANKS[:1])


def test_one_process_is_one_rank() -> None:
    runtime = FakeRuntime({0: {"imbalance": 2.5}})
    runtime.run_one()
    (alone,) = gather_ranks(runtime)
    assert (alone.rank, alone.imbalance, alone.summary.num_micro_batches) == (0, 2.5, 1)
