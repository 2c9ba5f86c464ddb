"""The picture of a pair: bars stand where and as long as their spans, in the lanes of their side."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from flex_trainer.records import PairTimeline, Span
from flex_trainer.reports.pair_plot import idle_times, pair_chart, pair_html
from flex_trainer.reports.plots import LEFT, PLOT_WIDTH, WIDTH

# forward  ####--------####......      # computes, - exchanges, . has ended; a sign is 1 ms
# backward ....##########------##
PAIR = PairTimeline(
    step=3,
    micro_batch=7,
    total_ms=22.0,
    spans=(
        Span("forward", "counts", 0.0, 4.0),
        Span("forward exchange", "counts", 4.0, 12.0),
        Span("backward", "combine", 4.0, 14.0),
        Span("backward exchange", "combine", 14.0, 20.0),
        Span("forward", "end", 14.0, 16.0),
        Span("backward", "end", 20.0, 22.0),
    ),
)


def bars(svg: str, css_class: str) -> list[tuple[float, float, float, str]]:
    """Begin and end in milliseconds, y in pixels and tooltip of the bars of a class."""
    scale = PAIR.total_ms / PLOT_WIDTH
    found = []
    for each in ElementTree.fromstring(svg).iter("rect"):
        if each.get("class") == css_class:
            x, y, width = (float(each.get(name, "")) for name in ("x", "y", "width"))
            found.append(((x - LEFT) * scale, (x + width - LEFT) * scale, y, each.findtext("title") or ""))
    return found


def test_bars_stand_where_their_spans_are() -> None:
    svg = pair_chart(PAIR)
    forward, backward = bars(svg, "bar series-forward"), bars(svg, "bar series-backward")
    (counts,), (combine,) = bars(svg, "bar series-counts"), bars(svg, "bar series-combine")
    for bar, span in zip(
        [*forward, *backward, counts, combine], [PAIR.spans[i] for i in (0, 4, 2, 5, 1, 3)], strict=True
    ):
        assert bar[:2] == pytest.approx((span.start_ms, span.end_ms), abs=1e-3)
    # Each side's exchanges are below its computing, the backward below the forward.
    assert forward[0][2] == forward[1][2] < counts[2] < backward[0][2] == backward[1][2] < combine[2]


def test_tooltips_have_names_and_times() -> None:
    svg = pair_chart(PAIR)
    assert bars(svg, "bar series-counts")[0][3] == "counts for the forward: 4.00 to 12.00 ms (8.00 ms)"
    up_to, to_end = (bar[3] for bar in bars(svg, "bar series-backward"))
    assert up_to == "backward up to its combine: 4.00 to 14.00 ms (10.00 ms)"
    assert to_end == "backward to its end: 20.00 to 22.00 ms (2.00 ms)"


def test_time_in_which_neither_lane_computes() -> None:
    assert idle_times(PAIR) == [(16.0, 20.0)]
    (idle,) = bars(pair_chart(PAIR), "idle")
    assert idle[:2] == pytest.approx((16.0, 20.0), abs=1e-3)
    late = PairTimeline(0, 0, 9.0, (Span("forward", "counts", 1.0, 3.0), Span("forward exchange", "counts", 3.0, 9.0)))
    assert idle_times(late) == [(0.0, 1.0), (3.0, 9.0)]


def test_the_axis_has_round_milliseconds_under_their_places() -> None:
    texts = list(ElementTree.fromstring(pair_chart(PAIR)).iter("text"))
    numbers = {each.text: float(each.get("x", "")) for each in texts if (each.text or "").isdigit()}
    assert list(numbers) == ["0", "5", "10", "15", "20"]
    assert numbers["10"] == pytest.approx(LEFT + PLOT_WIDTH * 10 / 22, abs=0.1)
    assert [each.text for each in texts if not (each.text or "").isdigit()] == [
        "ms",
        "forward",
        "exchanges",
        "backward",
        "exchanges",
    ]


def test_the_section_names_what_is_drawn() -> None:
    html = pair_html(PAIR)
    assert "micro-batch 7 (step 3)" in html and "22.0 ms, in 4.0 ms of which nothing was computed" in html
    for label in (
        "forward computes",
        "backward computes",
        "exchange: counts",
        "exchange: combine",
        "nothing is computed",
    ):
        assert f"</span>{label}</li>" in html
    assert "exchange: gather" not in html
    assert pair_html(None) == pair_html(PairTimeline(0, 0, 0.0, ())) == ""


def test_short_bars_are_seen_and_end_inside() -> None:
    spans = (Span("forward", "end", 0.0, 1000.0), Span("backward", "end", 1000.0, 1000.0))
    root = ElementTree.fromstring(pair_chart(PairTimeline(0, 0, 1000.0, spans)))
    (bar,) = (each for each in root.iter("rect") if each.get("class") == "bar series-backward")
    x, width = float(bar.get("x", "")), float(bar.get("width", ""))
    assert width > 0.5 and x + width <= LEFT + PLOT_WIDTH + 0.01


def test_a_picture_of_many_bars_is_wider_than_the_page() -> None:
    assert f'viewBox="0 0 {WIDTH} ' in pair_chart(PAIR) and "style=" not in pair_chart(PAIR)
    spans = tuple(Span("forward", "counts", float(number), number + 0.5) for number in range(300))
    svg = pair_chart(PairTimeline(0, 0, 299.5, spans))
    root = ElementTree.fromstring(svg)
    width = float(root.get("viewBox", "").split()[2])
    assert width > 2 * WIDTH and root.get("style") == f"width: {width:.0f}px"
    assert max(float(each.get("x", "")) + float(each.get("width", "")) for each in root.iter("rect")) < width
