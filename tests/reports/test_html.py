"""The report page as a browser and a disk meet it."""

from __future__ import annotations

import errno
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flex_trainer.config import FlexConfig
from flex_trainer.records import PairTimeline, RunRecords, Span
from flex_trainer.reports import render_report, write_report
from flex_trainer.reports.html import MAX_SPIKE_ROWS
from flex_trainer.reports.run_view import RunView
from flex_trainer.testing.fake_runtime import GIB_BYTES, LIMIT_BYTES, make_record

VOID_TAGS = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Collects text, headings, attributes and table rows; fails on a tag that closes another."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.num_rows = 0
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)
        self.num_rows += tag == "tr"
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] in ("h1", "h2"):
            self.headings.append(data)
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def spiky_records(num_records: int):
    return [
        make_record(
            index,
            is_spike=index % 3 == 1,
            demand_bytes=GIB_BYTES * (3 if index % 3 == 1 else 1) // 2,
            freed_bytes={"recompute": GIB_BYTES // 4, "offload": GIB_BYTES // 8},
            num_tokens=1000 + index,
            peak_bytes=GIB_BYTES * 5 // 2 if index == 4 else GIB_BYTES,
        )
        for index in range(num_records)
    ]


def test_the_page_has_the_run_in_it():
    page = Page(render_report(spiky_records(12), LIMIT_BYTES, {"model": "tiny <MoE> & co", "device": "cpu"}))
    assert page.headings == [
        "FlexTrainer report",
        "Summary",
        "Memory timeline",
        "Activation memory",
        "Bytes freed",
        "Time",
        "Tokens",
        "Imbalance",
        "Prediction error",
        "Spikes",
    ]
    for part in ("tiny <MoE> & co", "2.00 GiB", "2.50 GiB", "micro-batch 4, 125.0% of the limit", "3.00 GiB", "1,004"):
        assert part in page.text
    for label in ("limit", "measured peak", "predicted peak", "budget", "predicted", "actual", "baseline"):
        assert any(text.strip().startswith(label) for text in page.texts), label
    assert page.num_rows == 1 + 4  # a head, and micro-batches 1, 4, 7, 10
    values = [value for _, name, value in page.attributes if name == "data-values"]
    assert ",".join(["1"] * 4 + ["2.5"] + ["1"] * 7) in values  # the measured peaks in GiB


def exchanging_records(num_records: int):
    return [
        make_record(index, exchange_ms=40.0 + index, exposed_ms=10.0, pair_ms=80.0 if index % 2 else 0.0)
        for index in range(num_records)
    ]


PAIR = PairTimeline(
    1,
    3,
    9.0,
    (
        Span("forward", "counts", 0.0, 2.0),
        Span("forward exchange", "counts", 2.0, 5.0),
        Span("backward", "end", 2.0, 9.0),
    ),
)


def test_exchanges_and_a_pair_are_shown_where_there_are_any():
    page = Page(render_report(exchanging_records(4), LIMIT_BYTES, {}, pair=PAIR))
    assert page.headings[5:7] == ["Time", "Exchanges between ranks"]
    assert page.headings[-2:] == ["A forward beside a backward", "Spikes"]
    values = [value for _, name, value in page.attributes if name == "data-values"]
    assert "10,10,10,10" in values and "30,31,32,33" in values  # exposed, and the rest
    assert "pairs run together" in page.text and "76% of it hidden behind compute" in page.text


def test_the_cursor_is_only_on_charts_of_micro_batches():
    html = render_report(exchanging_records(4), LIMIT_BYTES, {}, pair=PAIR)
    assert html.count('class="cursor"') == html.count("<svg") - 1 == html.count(' data-num-points="')
    assert 'querySelectorAll("svg[data-num-points]")' in html


def test_a_run_hands_its_latest_pair_to_the_page(tmp_path: Path):
    class View(RunView):
        @property
        def limit_bytes(self) -> int:
            return LIMIT_BYTES

    view = View(FlexConfig(memory_limit="2GiB"))
    view.records = RunRecords(exchanging_records(4))
    assert "A forward beside a backward" not in view.report(tmp_path / "report.html").read_text()
    view.last_pair = PAIR
    assert "A forward beside a backward" in view.report(tmp_path / "report.html").read_text()


def test_nothing_is_fetched():
    html = render_report(spiky_records(12) + exchanging_records(2), LIMIT_BYTES, {}, pair=PAIR)
    page = Page(html)
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "xlink:href", "srcset", "action"}
    assert not any(tag in ("link", "img", "iframe", "object") for tag, _, _ in page.attributes)
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'") in (
        page.attributes
    )


def test_facts_cannot_inject_markup():
    page = Page(render_report([], LIMIT_BYTES, {"<script>a</script>": "</dd><img src=x onerror=b>"}))
    assert not any(tag in ("script", "img") for tag, _, _ in page.attributes)
    assert "<script>a</script>" in page.text


def test_no_records_says_so():
    page = Page(render_report([], LIMIT_BYTES, {}))
    assert page.headings == ["FlexTrainer report", "Summary"]
    assert "No micro-batch was recorded" in page.text


def test_one_record_without_spikes():
    page = Page(render_report([make_record(0)], LIMIT_BYTES, {}))
    assert "There was none." in page.text
    assert "No activation was recomputed, offloaded or quantized." in page.text


def test_a_long_run_stays_small_and_keeps_its_worst():
    records = spiky_records(10_000)
    html = render_report(records, LIMIT_BYTES, {})
    page = Page(html)
    assert len(html) < 500_000
    assert "Each point of a chart stands for 32 micro-batches" in page.text
    assert page.num_rows == 1 + MAX_SPIKE_ROWS
    assert f"The {MAX_SPIKE_ROWS} worst of 3,333" in page.text
    peaks = next(value for _, name, value in page.attributes if name == "data-values" and "2.5" in value.split(","))
    assert peaks.split(",").count("2.5") == 1
    assert [value for tag, name, value in page.attributes if (tag, name) == ("circle", "class")] == ["over"]


class TestWriting:
    def test_directories_are_made_and_an_old_report_replaced(self, tmp_path: Path):
        path = tmp_path / "runs" / "a" / "report.html"
        assert write_report(path, [], LIMIT_BYTES) == path
        write_report(str(path), [make_record(0)], LIMIT_BYTES, {"model": "tiny"})
        assert "tiny" in path.read_text()
        assert os.listdir(path.parent) == ["report.html"]
        assert path.stat().st_mode & 0o444 == 0o444

    def test_a_path_that_cannot_be_is_one_clear_error(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cannot be written to '.*file/report\.html': .*; choose a path") as info:
            write_report(tmp_path / "file" / "report.html", [], LIMIT_BYTES)
        assert isinstance(info.value.__cause__, OSError)

    def test_a_directory_in_its_place(self, tmp_path: Path):
        (tmp_path / "report.html").mkdir()
        with pytest.raises(ValueError, match="Is a directory"):
            write_report(tmp_path / "report.html", [], LIMIT_BYTES)
        assert os.listdir(tmp_path) == ["report.html"]

    def test_a_full_disk_leaves_the_old_report(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = write_report(tmp_path / "report.html", [], LIMIT_BYTES, {"run": "old"})

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(ValueError, match="No space left on device"):
            write_report(path, [make_record(0)], LIMIT_BYTES, {"run": "new"})
        assert "old" in path.read_text()
        assert os.listdir(tmp_path) == ["report.html"]
