"""The report: one HTML file that tells what a run did with its memory, and that opens anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from flex_trainer.files import write_whole
from flex_trainer.records import MicroBatchRecord, PairTimeline, StepRetry, totals_of
from flex_trainer.reports.page_style import CSS, SCRIPT
from flex_trainer.reports.pair_plot import pair_html
from flex_trainer.reports.panels import panels
from flex_trainer.reports.plots import LEFT, PLOT_WIDTH
from flex_trainer.reports.ranks import RankSummary, merge_ranks, nearest_line, ranks_html
from flex_trainer.reports.summary import RunSummary, summarize, summary_lines
from flex_trainer.reports.timeline import Timeline, make_timeline
from flex_trainer.totals import worst_of
from flex_trainer.units import format_bytes

MAX_SPIKE_ROWS = 100
"""Rows of the spikes table; a page with thousands is not read."""


def write_report(
    path: str | os.PathLike[str],
    records: Sequence[MicroBatchRecord],
    limit_bytes: int,
    info: Mapping[str, str] | None = None,
    retries: Sequence[StepRetry] = (),
    ranks: Sequence[RankSummary] = (),
    pair: PairTimeline | None = None,
) -> Path:
    """Write the report page of `records`, whole or not at all, and return its path.

    Args:
        path: the file; missing directories above it are made, an older report is replaced.
        records: in order of micro-batch. None at all gives a page that says so.
        limit_bytes: the memory limit.
        info: facts for the head of the page, such as model, device and versions, as (name, value).
        retries: steps that were rolled back and retried.
        ranks: of a run on several, what `gather_ranks` returns.
        pair: a forward and the backward beside it, to be drawn.

    Raises:
        ValueError: the file cannot be written (no permission, not a directory, a full disk).
    """
    return write_whole(Path(path), render_report(records, limit_bytes, info or {}, retries, ranks, pair), "the report")


def render_report(
    records: Sequence[MicroBatchRecord],
    limit_bytes: int,
    info: Mapping[str, str],
    retries: Sequence[StepRetry] = (),
    ranks: Sequence[RankSummary] = (),
    pair: PairTimeline | None = None,
) -> str:
    """The report page as text."""
    timeline = make_timeline(records)
    summary = merge_ranks(ranks) if len(ranks) > 1 else summarize(records, limit_bytes, retries)
    body = [_head(info), _summary(records, summary, ranks), ranks_html(ranks)]
    if records:
        body.append(_grouping_note(timeline))
        body += [panel.html() for panel in panels(timeline)]
        body.append(pair_html(pair))
        body.append(_spikes(records))
        body.append(_retries(retries))
        body.append('<div id="where" aria-live="polite"></div>')
    page_data = (
        f"data-first='{json.dumps(timeline.first)}' data-last='{json.dumps(timeline.last)}' "
        f'data-left="{LEFT}" data-plot="{PLOT_WIDTH}"'
    )
    script = f"<script>{SCRIPT}</script>" if records else ""
    # The policy makes the browser itself refuse any request: a report may hold private facts.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FlexTrainer report</title>
<style>{CSS}</style>
</head>
<body {page_data}>
{"".join(body)}
{script}
</body>
</html>
"""


def _head(info: Mapping[str, str]) -> str:
    facts = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in info.items())
    return f'<header><h1>FlexTrainer report</h1><dl class="facts">{facts}</dl></header>'


def _summary(records: Sequence[MicroBatchRecord], summary: RunSummary, ranks: Sequence[RankSummary]) -> str:
    tiles = []
    for label, value in [*summary_lines(summary), *([nearest_line(ranks)] if len(ranks) > 1 else [])]:
        number, _, note = value.partition(" (")  # "1.40 GiB (micro-batch 7)": the part in brackets goes below
        small = f"<small>{escape(note.removesuffix(')'))}</small>" if note else ""
        bad = ' class="bad"' if label == "over the limit" and summary.num_over_limit else ""
        tiles.append(f"<div{bad}><dt>{escape(label)}</dt><dd>{escape(number)}{small}</dd></div>")
    note = "" if records else "<p>No micro-batch was recorded: training has not run, or ended before its first.</p>"
    return f'<section><h2>Summary</h2>{note}<dl class="tiles">{"".join(tiles)}</dl></section>'


def _spikes(records: Sequence[MicroBatchRecord]) -> str:
    totals = totals_of(records)
    title = "<h2>Spikes</h2>"
    explanation = "<p>Micro-batches with a keep-all demand above their budget, or a peak above the limit.</p>"
    if not totals.noteworthy:
        return f"<section>{title}{explanation}<p>There was none.</p></section>"
    shown = totals.noteworthy
    note = ""
    if totals.num_noteworthy > MAX_SPIKE_ROWS:
        shown = worst_of(shown, MAX_SPIKE_ROWS)
        which = f"The {MAX_SPIKE_ROWS} worst of {totals.num_noteworthy:,}"
        note = f"<p>{which}: over the limit, then furthest over budget.</p>"
    heads = ("micro-batch", "step", "tokens", "imbalance", "keep-all demand", "budget", "held", "peak", "re-plans")
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(_spike_row(record) for record in shown)
    return (
        f'<section>{title}{explanation}{note}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _spike_row(record: MicroBatchRecord) -> str:
    cells = (
        f"{record.micro_batch}",
        f"{record.step}",
        f"{record.num_tokens:,}",
        f"{record.imbalance:.2f}",
        format_bytes(record.demand_bytes),
        format_bytes(record.budget_bytes),
        format_bytes(record.actual_bytes),
    )
    peak_class = ' class="bad"' if record.is_over_limit else ""
    return (
        "<tr>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f"<td{peak_class}>{format_bytes(record.peak_bytes)}</td><td>{record.num_replans}</td></tr>"
    )


def _retries(retries: Sequence[StepRetry]) -> str:
    """Nothing where nothing failed: then there is nothing to explain."""
    if not retries:
        return ""
    shown = retries[-MAX_SPIKE_ROWS:]
    note = f"<p>The latest {MAX_SPIKE_ROWS} of {len(retries):,}.</p>" if len(retries) > len(shown) else ""
    heads = ("step", "micro-batch", "attempt", "where", "operator", "asked for", "kept free since")
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(_retry_row(retry) for retry in shown)
    return (
        "<section><h2>Steps retried</h2><p>An allocation failed; the optimizer step was rolled back and its "
        "micro-batches were retried in less memory, with the same result. Attempt 1 keeps more free, attempt 2 runs "
        "the minimum-memory plan, attempt 0 shares memory among more micro-batches in flight.</p>"
        f'{note}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _retry_row(retry: StepRetry) -> str:
    cells = (
        f"{retry.step}",
        f"{retry.micro_batch}",
        f"{retry.attempt}",
        escape(retry.phase),
        escape(retry.operator),
        format_bytes(retry.requested_bytes) if retry.requested_bytes else "not known",
        format_bytes(retry.margin_bytes),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _grouping_note(timeline: Timeline) -> str:
    if timeline.group_size == 1:
        return ""
    return (
        f"<p>Each point of a chart stands for {timeline.group_size} micro-batches, and shows the largest value "
        "among them.</p>"
    )
