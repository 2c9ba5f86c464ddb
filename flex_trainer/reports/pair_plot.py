"""A picture of a forward and the backward beside it: what computed when, and what was on its way between ranks."""

from __future__ import annotations

from collections import Counter
from html import escape

from flex_trainer.records import PairTimeline, Span
from flex_trainer.reports.plots import BOTTOM, LEFT, PLOT_WIDTH, RIGHT, TOP, nice_ticks

_COMPUTE_HEIGHT, _EXCHANGE_HEIGHT, _GAP, _WIDE_GAP = 30, 16, 3, 14
_LEAST_WIDTH = 0.6
"""Pixels of a bar: shorter ones would not be seen."""
_MEAN_WIDTH = 8
"""Pixels for each bar of the fullest lane: with more bars than fit, the picture is wider than the page and scrolls."""
_TICK_WIDTH = 87
_LANES = {
    "forward": TOP,
    "forward exchange": TOP + _COMPUTE_HEIGHT + _GAP,
    "backward": TOP + _COMPUTE_HEIGHT + _GAP + _EXCHANGE_HEIGHT + _WIDE_GAP,
    "backward exchange": TOP + 2 * (_COMPUTE_HEIGHT + _GAP) + _EXCHANGE_HEIGHT + _WIDE_GAP,
}
"""Lanes from top to bottom, and where each begins, in pixels."""
_LANES_END = _LANES["backward exchange"] + _EXCHANGE_HEIGHT
_HEIGHT = _LANES_END + 4 + BOTTOM
_EXCHANGES = ("counts", "dispatch", "combine", "gather")


def pair_html(pair: PairTimeline | None) -> str:
    """A section of the report; nothing where there is no pair."""
    if pair is None or not pair.spans:
        return ""
    idle_ms = sum(end - start for start, end in idle_times(pair))
    explanation = (
        f"The forward of micro-batch {pair.micro_batch} (step {pair.step}) in turns with the backward of the one "
        f"before it, on the rank that wrote this page: {pair.total_ms:,.1f} ms, in {idle_ms:,.1f} ms of which nothing "
        "was computed. An exchange is hidden where either lane computes meanwhile."
    )
    return (
        f"<section><h2>A forward beside a backward</h2><p>{escape(explanation)}</p>"
        f'<div class="scroll">{pair_chart(pair)}</div>{_legend(pair, has_idle=idle_ms > 0)}</section>'
    )


def pair_chart(pair: PairTimeline) -> str:
    """The picture as an `<svg>` element: four lanes over time in milliseconds."""
    total_ms = max(pair.total_ms, *(span.end_ms for span in pair.spans), 1e-9)
    most_bars = max(Counter(span.lane for span in pair.spans).values())
    plot_width = max(PLOT_WIDTH, _MEAN_WIDTH * most_bars)
    width = LEFT + plot_width + RIGHT

    def x_of(ms: float) -> float:
        return LEFT + plot_width * ms / total_ms

    style = f' style="width: {width}px"' if plot_width > PLOT_WIDTH else ""
    parts = [
        f'<svg viewBox="0 0 {width} {_HEIGHT}"{style} role="img" '
        'aria-label="A forward and a backward in turns, with their exchanges, over time">'
    ]
    parts += _time_axis(total_ms, plot_width)
    for lane, y in _LANES.items():
        height = _height_of(lane)
        label = "exchanges" if lane.endswith("exchange") else lane
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{plot_width}" height="{height}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    for start, end in idle_times(pair):
        parts.append(
            f'<rect class="idle" x="{x_of(start):.2f}" y="{TOP}" width="{x_of(end) - x_of(start):.2f}" '
            f'height="{_LANES_END - TOP}"><title>nothing computed: {_when(start, end)}</title></rect>'
        )
    for span in pair.spans:
        y, height = _LANES[span.lane], _height_of(span.lane)
        width = max(x_of(span.end_ms) - x_of(span.start_ms), _LEAST_WIDTH)
        x = min(x_of(span.start_ms), LEFT + plot_width - width)
        parts.append(
            f'<rect class="bar series-{_series_of(span)}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}">'
            f"<title>{escape(_tooltip(span))}</title></rect>"
        )
    return "\n".join([*parts, "</svg>"])


def idle_times(pair: PairTimeline) -> list[tuple[float, float]]:
    """When neither lane computed, as (begin, end) in milliseconds, in order."""
    idle, computed_ms = [], 0.0
    computing = [(span.start_ms, span.end_ms) for span in pair.spans if span.lane in ("forward", "backward")]
    for start, end in [*sorted(computing), (pair.total_ms, pair.total_ms)]:
        if start > computed_ms:
            idle.append((computed_ms, start))
        computed_ms = max(computed_ms, end)
    return idle


def _time_axis(total_ms: float, plot_width: float) -> list[str]:
    y = _HEIGHT - BOTTOM + 16
    parts = [f'<text class="tick" x="{LEFT - 6}" y="{y}" text-anchor="end">ms</text>']
    for tick in nice_ticks(total_ms, num_wanted=round(plot_width / _TICK_WIDTH)):
        if tick > total_ms:
            break
        x = LEFT + plot_width * tick / total_ms
        anchor = "end" if x > LEFT + plot_width - 18 else "middle"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{_HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{tick:,.10g}</text>')
    return parts


def _legend(pair: PairTimeline, *, has_idle: bool) -> str:
    shown = {_series_of(span) for span in pair.spans}
    names = [
        *((f"series-{side}", f"{side} computes") for side in ("forward", "backward") if side in shown),
        *((f"series-{name}", f"exchange: {name}") for name in _EXCHANGES if name in shown),
        *([("idle", "nothing is computed")] if has_idle else []),
    ]
    items = (f'<li><span class="key box {css_class}"></span>{label}</li>' for css_class, label in names)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _height_of(lane: str) -> int:
    return _EXCHANGE_HEIGHT if lane.endswith("exchange") else _COMPUTE_HEIGHT


def _series_of(span: Span) -> str:
    return span.name if span.lane.endswith("exchange") else span.lane


def _tooltip(span: Span) -> str:
    what = f"{span.name} for the {span.lane.removesuffix(' exchange')}"
    if not span.lane.endswith("exchange"):
        what = f"{span.lane} to its end" if span.name == "end" else f"{span.lane} up to its {span.name}"
    return f"{what}: {_when(span.start_ms, span.end_ms)}"


def _when(start_ms: float, end_ms: float) -> str:
    return f"{start_ms:,.2f} to {end_ms:,.2f} ms ({end_ms - start_ms:,.2f} ms)"
