"""Which charts a report has, and what each one says."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from flex_trainer.config import STRATEGIES
from flex_trainer.reports.plots import Axis, Mark, Series, bytes_axis, legend, line_chart
from flex_trainer.reports.timeline import Timeline

MAX_SPIKE_MARKS = 60
"""With more spikes than this (points of the chart), they are not marked one by one."""

_STRATEGY_LABELS = {"recompute": "recomputed", "offload": "offloaded", "quantize": "quantized"}


@dataclass(frozen=True)
class Panel:
    """A chart with its heading, a sentence that says how to read it, and its legend."""

    title: str
    explanation: str
    chart: str
    legend: str
    is_stacked: bool = False

    def html(self) -> str:
        stack = ' class="stack"' if self.is_stacked else ""
        return (
            f"<section{stack}><h2>{escape(self.title)}</h2><p>{escape(self.explanation)}</p>"
            f"{self.chart}{self.legend}</section>"
        )


def panels(timeline: Timeline) -> list[Panel]:
    """The report's charts for a timeline of at least one point, in reading order."""
    return [
        _memory(timeline),
        _activations(timeline),
        _freed(timeline),
        _times(timeline),
        *_exchanges(timeline),
        _simple(timeline, "Tokens", "Tokens per micro-batch, padding included.", "tokens", "num_tokens", Axis("")),
        _simple(
            timeline,
            "Imbalance",
            "Most tokens routed to one expert over the mean of all experts, in the layer where that is largest. "
            "1 for a dense model.",
            "imbalance",
            "imbalance",
            Axis("x"),
        ),
        _simple(
            timeline,
            "Prediction error",
            "How far the predicted activation bytes were from those held. Profiling micro-batches predict nothing.",
            "error",
            "error_percent",
            Axis("%"),
        ),
    ]


def _memory(timeline: Timeline) -> Panel:
    columns = timeline.columns
    series = [
        Series("baseline", "baseline, before forward", columns["baseline_bytes"], is_filled=True),
        Series("limit", "limit", columns["limit_bytes"], is_dashed=True),
        Series("peak", "measured peak", columns["peak_bytes"]),
        Series("predicted_peak", "predicted peak", columns["predicted_peak_bytes"], is_dashed=True),
    ]
    axis = bytes_axis([value for one in series for value in one.values])
    marks = _marks(timeline)
    dots = "".join(
        f'<li><span class="key dot {css_class}"></span>{label}</li>'
        for css_class, label in (("spike", "spike"), ("over", "over the limit"))
        if any(mark.css_class == css_class for mark in marks)
    )
    return Panel(
        "Memory timeline",
        "Memory in use in each micro-batch, against the limit.",
        line_chart("Memory in use per micro-batch", timeline.first, series, axis, height=280, marks=marks),
        legend(series, axis) + (f'<ul class="legend">{dots}</ul>' if dots else ""),
    )


def _marks(timeline: Timeline) -> list[Mark]:
    # Dots on every second point would hide the line that they are about; what is over the limit is always marked.
    show_spikes = sum(timeline.is_spike) <= MAX_SPIKE_MARKS
    marks = []
    for index, peak_bytes in enumerate(timeline.columns["peak_bytes"]):
        where = f"micro-batch {timeline.first[index]}"
        if timeline.is_over_limit[index]:
            marks.append(Mark(index, peak_bytes, "over", f"{where}: over the limit"))
        elif timeline.is_spike[index] and show_spikes:
            marks.append(Mark(index, peak_bytes, "spike", f"{where}: spike"))
    return marks


def _activations(timeline: Timeline) -> Panel:
    columns = timeline.columns
    series = [
        Series("demand", "demand if all were kept", columns["demand_bytes"], is_filled=True),
        Series("budget", "budget", columns["budget_bytes"], is_dashed=True),
        Series("actual", "actual", columns["actual_bytes"]),
        Series("predicted", "predicted", columns["predicted_bytes"], is_dashed=True),
    ]
    axis = bytes_axis([value for one in series for value in one.values])
    return Panel(
        "Activation memory",
        "Activation bytes held at the end of forward. Where demand is above the budget, some have to be given back.",
        line_chart("Activation memory per micro-batch", timeline.first, series, axis, height=240),
        legend(series, axis),
    )


def _freed(timeline: Timeline) -> Panel:
    series = [
        Series(name, _STRATEGY_LABELS[name], timeline.columns[f"freed_{name}_bytes"])
        for name in STRATEGIES
        if any(timeline.columns[f"freed_{name}_bytes"])
    ]
    if not series:
        return Panel("Bytes freed", "No activation was recomputed, offloaded or quantized.", "", "")
    totals = [sum(values) for values in zip(*(one.values for one in series), strict=True)]
    axis = bytes_axis(totals)
    return Panel(
        "Bytes freed",
        "Activation bytes not held at the end of forward, by strategy, stacked.",
        line_chart("Bytes freed by strategy", timeline.first, series, axis, height=200, is_stacked=True),
        legend(series, axis),
        is_stacked=True,
    )


def _times(timeline: Timeline) -> Panel:
    series = [
        Series("actual", "measured", timeline.columns["run_ms"], is_filled=True),
        Series("predicted", "predicted", timeline.columns["predicted_step_ms"], is_dashed=True),
    ]
    axis = Axis("ms")
    return Panel(
        "Time",
        "Forward and backward of each micro-batch, without planning. The first one and those that only measure have no "
        "prediction.",
        line_chart("Time per micro-batch", timeline.first, series, axis, height=150),
        legend(series, axis),
    )


def _exchanges(timeline: Timeline) -> list[Panel]:
    """None where nothing was exchanged."""
    exposed, hidden = timeline.columns["exposed_ms"], timeline.columns["hidden_ms"]
    if not any(exposed) and not any(hidden):
        return []
    series = [
        Series("exposed", "exposed: nothing was computed", exposed),
        Series("hidden", "hidden behind compute", hidden),
    ]
    axis = Axis("ms")
    return [
        Panel(
            "Exchanges between ranks",
            "Time in which rows or gathered weights were on their way, stacked. Only the exposed part makes a step "
            "longer.",
            line_chart("Exchange time per micro-batch", timeline.first, series, axis, height=150, is_stacked=True),
            legend(series, axis),
            is_stacked=True,
        )
    ]


def _simple(timeline: Timeline, title: str, explanation: str, name: str, column: str, axis: Axis) -> Panel:
    series = [Series(name, title.lower(), timeline.columns[column], is_filled=True)]
    return Panel(
        title,
        explanation,
        line_chart(f"{title} per micro-batch", timeline.first, series, axis, height=150),
        legend(series, axis),
    )
