"""Charts as inline SVG, drawn by hand: no fonts, scripts or images from elsewhere, colours from the page's style.

Every chart shares one x axis (micro-batches), so that charts stacked on a page line up. Lines get their colour by CSS
class (`series-NAME`), which is how one drawing is legible on a light and on a dark page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 78, 12, 10, 26
PLOT_WIDTH = WIDTH - LEFT - RIGHT


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack."""

    name: str
    """Short identifier; the CSS class is `series-NAME`."""
    label: str
    """What the legend says."""
    values: Sequence[float]
    """One per point of the x axis."""
    is_dashed: bool = False
    """Dashed: a bound or a prediction, not something measured."""
    is_filled: bool = False
    """Also fill the area below the line."""


@dataclass(frozen=True)
class Mark:
    """A dot on a chart."""

    index: int
    """Point of the x axis."""
    value: float
    """Height, in the unit of the series."""
    css_class: str
    """Gives its colour."""
    tooltip: str
    """Shown while the pointer rests on it."""


@dataclass(frozen=True)
class Axis:
    """What a chart measures along y, already scaled."""

    unit: str
    """Written at the axis."""
    divisor: float = 1.0
    """Values are divided by this to be in `unit`."""


def bytes_axis(values: Sequence[float]) -> Axis:
    """The binary unit in which the largest of `values` is at least 1."""
    largest = max(values, default=0)
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= size:
            return Axis(unit, size)
    return Axis("B")


def nice_ticks(largest: float, num_wanted: int = 4) -> list[float]:
    """Round tick values (1, 2 or 5 times a power of ten apart) from 0 to the first one not below `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / num_wanted
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    ticks = [0.0]
    while ticks[-1] < largest * 0.999:
        ticks.append(len(ticks) * step)
    return ticks


def line_chart(
    title: str,
    first: Sequence[int],
    series: Sequence[Series],
    axis: Axis,
    height: int = 220,
    marks: Sequence[Mark] = (),
    is_stacked: bool = False,
) -> str:
    """One chart as an `<svg>` element.

    Args:
        title: for screen readers.
        first: the number of each point's first micro-batch, rising, at least one.
        series: drawn in order, later ones on top. Their values are in bytes, tokens, ...; `axis` scales them.
        axis: unit of y.
        height: in pixels.
        marks: dots, drawn on top.
        is_stacked: stack the series as filled areas, the first at the bottom.
    """
    scaled = [[value / axis.divisor for value in one.values] for one in series]
    if is_stacked:
        scaled = [[sum(values) for values in zip(*scaled[: index + 1], strict=True)] for index in range(len(scaled))]
    ticks = nice_ticks(max((max(values) for values in scaled), default=0))
    bottom, plot_height = height - BOTTOM, height - TOP - BOTTOM

    def y_of(value: float) -> float:
        return bottom - plot_height * value / ticks[-1]

    num_points = len(first)
    xs = [x_of(index, num_points) for index in range(num_points)]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" data-num-points="{num_points}">'
    ]
    parts += _grid(ticks, axis, y_of)
    parts += _x_axis(first, xs, bottom)
    layers = list(zip(series, scaled, strict=True))
    if is_stacked:
        layers.reverse()  # the highest sum first; each lower layer covers its own part of it
    for one, values in layers:
        points = _step_points(xs, [y_of(value) for value in values])
        if one.is_filled or is_stacked:
            parts.append(
                f'<path class="area series-{one.name}" d="M{points[0][0]:.1f},{bottom:.1f} {_lines(points)} '
                f'L{points[-1][0]:.1f},{bottom:.1f} Z"/>'
            )
        if not is_stacked:
            dashed = " dashed" if one.is_dashed else ""
            parts.append(f'<path class="line{dashed} series-{one.name}" d="M{_lines(points)[1:]}"/>')
    for mark in marks:
        parts.append(
            f'<circle class="{mark.css_class}" cx="{xs[mark.index]:.1f}" cy="{y_of(mark.value / axis.divisor):.1f}" '
            f'r="3.2"><title>{escape(mark.tooltip)}</title></circle>'
        )
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{bottom}" x1="-9" x2="-9"/></svg>')
    return "\n".join(parts)


def x_of(index: int, num_points: int) -> float:
    """The middle of a point's slot, in pixels of the drawing."""
    return LEFT + PLOT_WIDTH * (index + 0.5) / num_points


def _step_points(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    # A micro-batch is a slot with a height, not a sample of something continuous: short runs are drawn as steps. Long
    # ones would only show noise that way.
    if len(xs) > 160:
        return list(zip(xs, ys, strict=True))
    half = PLOT_WIDTH / len(xs) / 2
    return [(x + side, y) for x, y in zip(xs, ys, strict=True) for side in (-half, half)]


def _lines(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"L{x:.1f},{y:.1f}" for x, y in points)


def _grid(ticks: Sequence[float], axis: Axis, y_of: Callable[[float], float]) -> list[str]:
    parts = []
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        unit = f" {escape(axis.unit)}" if tick == ticks[-1] and axis.unit else ""
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.10g}{unit}</text>')
    return parts


def _x_axis(first: Sequence[int], xs: Sequence[float], bottom: float) -> list[str]:
    y = bottom + 16
    parts = [f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">micro-batch</text>']
    # Step 1: round numbers, counted in micro-batches and not in points.
    step = max(1, round(nice_ticks(first[-1] - first[0], num_wanted=10)[1]))
    for label in range(-(-first[0] // step) * step, first[-1] + 1, step):
        # Step 2: each under the point that has it.
        x = xs[bisect_right(first, label) - 1]
        anchor = "end" if x > WIDTH - 40 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{label:,}</text>')
    return parts


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"  # never 1.2e+04


def legend(series: Sequence[Series], axis: Axis) -> str:
    """The names of the lines, each beside a stroke like its own; the page's script adds the value at the cursor."""
    items = []
    for one in series:
        values = ",".join(_short(value / axis.divisor) for value in one.values)
        dashed = " dashed" if one.is_dashed else ""
        items.append(
            f'<li data-values="{values}" data-unit="{escape(axis.unit)}"><span class="key{dashed} series-{one.name}">'
            f"</span>{escape(one.label)} <output></output></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'
