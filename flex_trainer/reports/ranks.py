"""A run on several ranks: what each of them used, and which was nearest to its limit."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Protocol

from flex_trainer.records import RunRecords, StepRetry, totals_of
from flex_trainer.reports.summary import RunSummary, summarize
from flex_trainer.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

MAX_RANK_ROWS = 32
"""Rows of a table of ranks: those nearest to their limits, where there are more."""

_HEADS = ("rank", "host", "peak", "limit", "share", "spikes", "over", "imbalance")


@dataclass(frozen=True)
class RankSummary:
    """One rank's part of a run."""

    rank: int
    host: str
    summary: RunSummary
    imbalance: float
    """Largest of its micro-batches; see `MicroBatchRecord.imbalance`."""

    @property
    def limit_share(self) -> float:
        """The measured peak over the limit; 0 without a limit."""
        return self.summary.peak_bytes / self.summary.limit_bytes if self.summary.limit_bytes else 0.0


class Runtime(Protocol):
    """What is read of the runtime."""

    @property
    def records(self) -> RunRecords: ...

    @property
    def retries(self) -> Sequence[StepRetry]: ...

    @property
    def limit_bytes(self) -> int: ...


def gather_ranks(runtime: Runtime) -> list[RankSummary]:
    """The summaries of all ranks, in their order, on every rank. With several processes, all have to call this."""
    import torch

    from flex_trainer.ranks import num_ranks, this_rank

    mine = RankSummary(
        rank=this_rank(),
        host=socket.gethostname(),
        summary=summarize(runtime.records, runtime.limit_bytes, runtime.retries),
        imbalance=totals_of(runtime.records).imbalance,
    )
    ranks = [mine] * num_ranks()
    if len(ranks) > 1:
        torch.distributed.all_gather_object(ranks, mine)
    return ranks


def nearest_to_limit(ranks: Sequence[RankSummary]) -> RankSummary:
    """The rank whose peak was the largest share of its limit."""
    return max(ranks, key=lambda rank: rank.limit_share)


def merge_ranks(ranks: Sequence[RankSummary]) -> RunSummary:
    """One summary of all ranks: limit and peak are those of the rank nearest to its limit, counts and bytes are added,
    times are the largest, prediction errors are the mean. Exchanges are those of the rank where they took longest."""
    summaries = [rank.summary for rank in ranks]
    errors = [one.mean_prediction_error_percent for one in summaries if one.mean_prediction_error_percent is not None]
    pair_errors = [one.mean_pair_error_percent for one in summaries if one.mean_pair_error_percent is not None]
    longest = max(summaries, key=lambda one: one.exchange_ms)
    time_errors = [one.mean_time_error_percent for one in summaries if one.mean_time_error_percent is not None]
    return replace(
        nearest_to_limit(ranks).summary,
        predicted_peak_bytes=max(one.predicted_peak_bytes for one in summaries),
        num_micro_batches=sum(one.num_micro_batches for one in summaries),
        num_spikes=sum(one.num_spikes for one in summaries),
        num_over_limit=sum(one.num_over_limit for one in summaries),
        num_retries=sum(one.num_retries for one in summaries),
        recomputed_bytes=sum(one.recomputed_bytes for one in summaries),
        offloaded_bytes=sum(one.offloaded_bytes for one in summaries),
        quantized_bytes=sum(one.quantized_bytes for one in summaries),
        median_step_ms=max(one.median_step_ms for one in summaries),
        mean_prediction_error_percent=sum(errors) / len(errors) if errors else None,
        plan_percent=max(one.plan_percent for one in summaries),
        mean_time_error_percent=sum(time_errors) / len(time_errors) if time_errors else None,
        exchange_ms=longest.exchange_ms,
        exposed_ms=longest.exposed_ms,
        num_pairs=sum(one.num_pairs for one in summaries),
        mean_pair_error_percent=sum(pair_errors) / len(pair_errors) if pair_errors else None,
    )


def nearest_line(ranks: Sequence[RankSummary]) -> tuple[str, str]:
    """Label and value for a summary."""
    nearest = nearest_to_limit(ranks)
    return "nearest to its limit", f"rank {nearest.rank} of {len(ranks)} ({nearest.host})"


def rank_table(ranks: Sequence[RankSummary]) -> Table:
    """One row per rank, for the terminal."""
    from rich.table import Table

    shown = _shown(ranks)
    title = "Ranks" if len(shown) == len(ranks) else f"The {len(shown)} of {len(ranks)} ranks nearest to their limits"
    table = Table(title=title, title_justify="left")
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "host" else "right", no_wrap=head != "host")
    for rank in shown:
        table.add_row(*_cells(rank), style="bold red" if rank.summary.num_over_limit else None)
    return table


def ranks_html(ranks: Sequence[RankSummary]) -> str:
    """The same as a section of the report; nothing for one rank."""
    if len(ranks) < 2:
        return ""
    shown = _shown(ranks)
    note = "" if len(shown) == len(ranks) else f"<p>The {len(shown)} of {len(ranks):,} nearest to their limits.</p>"
    head = "".join(f"<th>{name}</th>" for name in _HEADS)
    rows = ""
    for rank in shown:
        bad = ' class="bad"' if rank.summary.num_over_limit else ""
        rows += "<tr>" + "".join(f"<td{bad}>{escape(cell)}</td>" for cell in _cells(rank)) + "</tr>"
    return (
        f"<section><h2>Ranks</h2>{note}"
        "<p>Over: micro-batches with a peak above the limit. The summary is of all ranks; charts and tables of "
        "micro-batches are of the rank that wrote this page.</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _shown(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    nearest_first = sorted(ranks, key=lambda rank: rank.limit_share, reverse=True)[:MAX_RANK_ROWS]
    return sorted(nearest_first, key=lambda rank: rank.rank)


def _cells(rank: RankSummary) -> tuple[str, ...]:
    summary = rank.summary
    return (
        f"{rank.rank}",
        rank.host,
        format_bytes(summary.peak_bytes),
        format_bytes(summary.limit_bytes),
        f"{100 * rank.limit_share:.1f}%",
        f"{summary.num_spikes:,}",
        f"{summary.num_over_limit:,}",
        f"{rank.imbalance:.2f}",
    )
