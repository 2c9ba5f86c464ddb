"""What a run did, for a person: a table, and a page with charts."""

from flex_trainer.reports.html import render_report, write_report
from flex_trainer.reports.ranks import RankSummary, gather_ranks, rank_table
from flex_trainer.reports.summary import RunSummary, summarize, summary_lines, summary_table

__all__ = [
    "RankSummary",
    "RunSummary",
    "gather_ranks",
    "rank_table",
    "render_report",
    "summarize",
    "summary_lines",
    "summary_table",
    "write_report",
]
