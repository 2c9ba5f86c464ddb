"""The drawings: where ticks and lines are, in numbers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from flex_trainer.reports.plots import (
    BOTTOM,
    LEFT,
    PLOT_WIDTH,
    TOP,
    Axis,
    Mark,
    Series,
    bytes_axis,
    legend,
    line_chart,
    nice_ticks,
)

GIB_BYTES = 2**30


@pytest.mark.parametrize(
    ("largest", "ticks"),
    [
        (0, [0, 1]),
        (4, [0, 1, 2, 3, 4]),
        (1.4, [0, 0.5, 1, 1.5]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (9300, [0, 5000, 10000]),
    ],
)
def test_ticks_are_round_and_reach_the_largest(largest, ticks):
    assert nice_ticks(largest) == pytest.approx(ticks)


@pytest.mark.parametrize(("largest", "unit"), [(3 * GIB_BYTES, "GiB"), (5 * 2**20, "MiB"), (2048, "KiB"), (7, "B")])
def test_unit_of_bytes(largest, unit):
    assert bytes_axis([1, largest]).unit == unit
    assert bytes_axis([]).unit == "B"


def heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"[ML][-\d.]+,([-\d.]+)", path)]


def path_of(svg: str, css_class: str) -> str:
    root = ElementTree.fromstring(svg)
    (path,) = (each for each in root.iter("path") if each.get("class") == css_class)
    return path.get("d", "")


def test_a_line_stands_at_its_values():
    svg = line_chart("t", [0, 1], [Series("peak", "peak", [GIB_BYTES, 2 * GIB_BYTES])], Axis("GiB", GIB_BYTES), 136)
    plot_height = 136 - TOP - BOTTOM
    # One step per micro-batch, two corners each; the scale ends at 2 GiB.
    middle, top = TOP + plot_height / 2, float(TOP)
    assert heights(path_of(svg, "line series-peak")) == [middle, middle, top, top]


def test_stacked_layers_stand_on_one_another():
    series = [Series("recompute", "r", [1.0]), Series("offload", "o", [3.0])]
    svg = line_chart("t", [0], series, Axis(""), 136, is_stacked=True)
    bottom, plot_height = 136 - BOTTOM, 136 - TOP - BOTTOM
    assert min(heights(path_of(svg, "area series-recompute"))) == bottom - plot_height / 4
    assert min(heights(path_of(svg, "area series-offload"))) == TOP


def test_marks_and_titles_are_escaped():
    series = [Series("peak", "a < b & c", [1.0])]
    svg = line_chart("<title>", [0], series, Axis(""), marks=[Mark(0, 1.0, "spike", "<b>")])
    (circle,) = ElementTree.fromstring(svg).iter("circle")
    assert float(circle.get("cx", "")) == LEFT + PLOT_WIDTH / 2
    assert circle.findtext("title") == "<b>"
    assert "a &lt; b &amp; c" in legend(series, Axis(""))


def test_the_legend_carries_plain_numbers():
    assert 'data-values="0.3333,12345"' in legend([Series("tokens", "tokens", [1 / 3, 12_345])], Axis(""))


def test_x_labels_are_round_micro_batch_numbers():
    first = list(range(0, 10_000, 21))
    svg = line_chart("t", first, [Series("peak", "p", [1.0] * len(first))], Axis(""))
    labels = [each.text for each in ElementTree.fromstring(svg).iter("text")]
    assert "3,000" in labels
    assert "9,000" in labels
