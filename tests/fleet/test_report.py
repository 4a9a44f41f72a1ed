"""A fleet's report: what it shows is what the journal says, and everybody can read it."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_ext.errors import JournalError, TraceFileError
from hydra_ext.fleet import history
from hydra_ext.fleet.history import Foreseen, History, PastPlan
from hydra_ext.fleet.reporting import bars, charts, page, palette, status
from hydra_ext.fleet.scheduling.planning import Choice, Placed, Work, arranged
from support import fleet_folders
from support.fleet_folders import BEGIN, OPTIONS, Written


def past_of(folder: Path, seconds: float = 18.0) -> History:
    return history.load(folder, now=BEGIN + seconds)


def text_of(folder: Path, seconds: float = 18.0) -> str:
    past = past_of(folder, seconds)
    return page.page_of(past, status.of(past, folder, runs=True))


class Elements(HTMLParser):
    """All elements of a page, and the text inside each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, "each element has its end"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), list[str]())
        self.found.append(element)
        if tag != "meta":
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(texts)) for name, attributes, texts in self.found if name == tag]


def cells(text: str, caption: str) -> list[list[str]]:
    """The body of the table with a caption."""
    table = next(part for part in text.split("<table>") if part.startswith(f"<caption>{caption}"))
    rows = table.split("<tbody>")[1].split("</tbody>")[0].split("<tr>")[1:]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


# ---- for everybody --------------------------------------------------------------------------------------------------
def test_the_page_needs_nothing_else_and_has_a_text_for_each_picture(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    text = text_of(tmp_path)
    elements = Elements(text)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", text)
    assert elements.of("html")[0][0] == {"lang": "en"}
    names = {
        attributes["id"]: inner for attributes, inner in (*elements.of("title"), *elements.of("desc")) if attributes
    }
    pictures = [attributes for attributes, _ in elements.of("svg")]
    assert len(pictures) == 2 + 4 + 4  # two charts, and samples of each job's bars and line
    for attributes in pictures:
        if attributes.get("aria-hidden") != "true":
            assert attributes["role"] == "img"
            assert all(names[name] for name in str(attributes["aria-labelledby"]).split())
    assert len(names) == 4
    headings = [int(tag[1]) for tag, _, _ in elements.found if re.fullmatch(r"h\d", tag)]
    assert headings == [1, 2, 2, 2, 2]
    captions = [inner for _, inner in elements.of("caption")]
    assert len(captions) == len(elements.of("table")) == 6
    assert all(attributes["scope"] in ("col", "row") for attributes, _ in elements.of("th"))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("colours", "lines"), [(palette.LIGHT, palette.LIGHT_LINES), (palette.DARK, palette.DARK_LINES)]
)
def test_colours_can_be_told_from_the_paper_on_dark_and_light_displays(colours: Any, lines: tuple[str, ...]) -> None:
    paper = colours["paper"]
    assert all(contrast(colours[name], paper) >= 4.5 for name in ("ink", "quiet"))
    assert all(contrast(colour, paper) >= 3.0 for colour in (colours["failure"], *lines))
    assert all(contrast(palette.INSIDE, fill) >= 4.5 for fill in palette.FILLS)
    assert len(lines) == len(palette.FILLS) == charts.COLOURS


def test_texts_of_jobs_cannot_become_html(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    text = text_of(tmp_path)
    assert "<no>" not in text
    assert "<more>" not in text
    inner = {inner for _, inner in Elements(text).of("td")}
    assert {"ValueError: <no> such data", "it needs <more> & other things"} <= inner


# ---- what it says ---------------------------------------------------------------------------------------------------
def test_tables_have_plan_reality_results_and_trials(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    text = text_of(tmp_path)
    assert cells(text, "Planned at first") == [
        ["a", "plain", "1 of here", "5", "15", "", ""],
        ["b", "plain", "1 of here", "5", "15", "", ""],
        ["c", "plain", "1 of here", "15", "25", "", ""],
        ["d", "plain", "1 of here", "15", "25", "", ""],
    ]
    assert cells(text, "What happened") == [
        ["a", "plain", "here:0", "5", "15", "10", ""],
        ["b", "plain", "here:1", "5", "9.5", "4", "rank 0 was killed by signal -9"],
        ["b", "plain", "here:1", "9.5", "16.5", "6", ""],
        ["c", "plain", "here:0", "15", "16", "0", "ValueError: &lt;no&gt; such data"],
        ["b", "pipeline", "here:0,1", "16.5", "18", "8", ""],
    ]
    assert cells(text, "Moves") == [["b", "16", "pipeline on 2"]]
    assert [row[:4] for row in cells(text, "Jobs, the best first")] == [
        ["a", "done", "10", "0.2"],
        ["b", "open", "8", "0.25"],
        ["c", "set aside", "0", "-"],
        ["d", "open", "0", "-"],
    ]
    assert [row[:3] + row[6:] for row in cells(text, "Of a, b")] == [
        ["plain", "1", "1", ""],
        ["offload", "1", "3", ""],
        ["pipeline", "2", "0.5", ""],
        ["data parallel", "2", "", "exact=True rules it out"],
    ]
    assert [row[:2] for row in cells(text, "Of c, d")] == [["plain", "1"], ["offload", "1"]]


def test_bars_of_plan_and_reality_are_on_one_axis(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    text = text_of(tmp_path)
    drawn = [
        (float(x), float(width), tip)
        for x, width, tip in re.findall(
            r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" [^>]*><title>(.*?)</title>', text
        )
        if not tip.startswith("trials")
    ]
    second = (960 - 16 - 92) / 25  # units of the picture: the plan ends last, after 25 s
    for x, width, tip in drawn:
        start, end = map(float, re.findall(r"(?:from|to) ([\d.]+) s", tip))
        assert (x, width) == (
            pytest.approx(92 + start * second, abs=0.01),
            pytest.approx((end - start) * second, abs=0.01),
        )
    assert sorted(tip.split(":")[0].split(",")[0] for _, _, tip in drawn) == sorted("abcd" + "abbcbb")
    assert len(re.findall(r'class="failure"', text)) == 2
    assert len(re.findall(r'class="move"', text)) == 1


def test_a_move_is_marked_on_the_devices_that_the_job_had(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    (mark,) = bars.moves(past_of(tmp_path))
    assert (mark.row, mark.job, mark.at) == (("here", 1), "b", 16.0)
    assert mark.text == "b is asked after 16 s to go on with pipeline on 2"


def test_a_move_after_a_failure_is_marked_where_the_job_was_then(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 9.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.end(2.0, "a", 7, 0, "running", "OSError: no data")
    written.start(2.0, "a", 8, 0, "plain", 1)
    written.note("move", 4.0, job="a", option=2)
    assert [mark.row for mark in bars.moves(past_of(tmp_path))] == [("here", 1)]


def test_a_device_that_had_nothing_to_do_has_its_row(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")], devices=3)
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(2, 0.0, 4.0))
    past = past_of(tmp_path)
    assert bars.rows(past, bars.planned(past)) == [("here", 0), ("here", 1), ("here", 2)]


PLANS = st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 9.0), st.floats(0.0, 5.0)), min_size=1, max_size=9)


@given(PLANS)
def test_a_plan_has_room_on_the_devices_that_there_are(jobs: list[tuple[int, float, float]]) -> None:
    """A plan says how many devices a job has, not which: any plan of the planner can be drawn without overlaps."""
    works = [
        Work(name=f"job {i}", choices=[Choice(devices=devices, seconds=seconds)])
        for i, (devices, seconds, _) in enumerate(jobs)
    ]
    chosen = {
        work.name: Placed(option=0, node="one" if i % 3 else "other", start=jobs[i][2], end=0.0)
        for i, work in enumerate(works)
    }
    plan = arranged(works, {"one": 4, "other": 4}, chosen)
    foreseen = {
        work.name: Foreseen(
            technique="t",
            devices=work.choices[0].devices,
            node=plan.jobs[work.name].node,
            start=plan.jobs[work.name].start,
            end=plan.jobs[work.name].end,
        )
        for work in works
    }
    past = History(
        jobs={},
        measured={},
        plans=[PastPlan(at=0.0, end=plan.makespan, jobs=foreseen)],
        devices=4,
        seconds=0.0,
        next_gang=1,
        threads=None,
        is_finished=False,
    )
    drawn = bars.planned(past)
    assert {bar.row[1] for bar in drawn} <= set(range(4))
    assert {bar.parts for bar in drawn} == {1}
    for name, job in foreseen.items():
        assert len({bar.row for bar in drawn if bar.job == name}) == job.devices
    for one, other in itertools.combinations(drawn, 2):
        apart = one.end <= other.start + 1e-6 or other.end <= one.start + 1e-6
        assert one.row != other.row or apart


def test_jobs_that_share_a_device_lie_one_upon_the_other(tmp_path: Path) -> None:
    """Two at a time, and one that comes behind them."""
    written = Written(tmp_path, [fleet_folders.job(name) for name in "abc"])
    for name in "abc":
        written.measured(name, OPTIONS)
    written.plan(1.0, packs=[["a", "b"]], a=(0, 0.0, 4.0), b=(0, 0.0, 6.0), c=(0, 6.0, 9.0))
    written.start(1.0, "a", 7, 0, "shared offload", 0)
    written.start(1.0, "b", 8, 0, "shared offload", 0)
    written.end(5.0, "a", 7, 4, "done", None)
    written.end(7.0, "b", 8, 4, "done", None)
    written.start(7.0, "c", 9, 0, "plain", 0)
    past = past_of(tmp_path)
    for drawn in (bars.planned(past), bars.real(past)):
        assert {bar.job: (bar.row, bar.part, bar.parts) for bar in drawn} == {
            "a": (("here", 0), 0, 2),
            "b": (("here", 0), 1, 2),
            "c": (("here", 0), 0, 1),
        }
    tops = {
        job: float(y)
        for y, job in re.findall(r'y="([\d.]+)" width="[\d.]+" height="10.00" [^>]*><title>(\w):', text_of(tmp_path))
    }
    assert tops["b"] == tops["a"] + 10


# ---- losses ---------------------------------------------------------------------------------------------------------
def paths(chart: Element) -> dict[str, str]:
    return {str(path[0].text): path.attrib["d"] for path in chart.iter("path")}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5000))
def test_long_curves_keep_their_peaks(losses: list[float]) -> None:
    points = list(enumerate(losses))
    kept = charts._thinned(points)
    assert len(kept) <= 800
    assert [point[0] for point in kept] == sorted({point[0] for point in kept})
    numbers = [loss for loss in losses if not math.isnan(loss)]
    if numbers:
        assert min(numbers) in [loss for _, loss in kept]
        assert max(numbers) in [loss for _, loss in kept] or math.isnan(sum(losses))


def test_long_curves_are_thinned_by_buckets() -> None:
    losses = [float(-step) if step == 1234 else 1.0 / (step + 1) for step in range(10_000)]
    kept = charts._thinned(list(enumerate(losses)))
    assert len(kept) <= 800
    assert (1234, -1234.0) in kept
    assert kept[0] == (0, 1.0)


def test_a_curve_has_a_gap_where_the_loss_is_no_number() -> None:
    losses = {"a": {1: 0.0, 2: 1.0, 3: math.nan, 4: 1.0, 5: 0.0}, "b": {1: math.inf}}
    drawn = paths(charts.curves(losses, description="d"))
    assert list(drawn) == ["a"]
    pieces = re.findall(r"M[^M]*", drawn["a"])
    assert [piece.count("L") for piece in pieces] == [1, 1]
    ys = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn["a"])]
    assert ys == [256.0, 12.0, 12.0, 256.0]  # down is more


def test_jobs_beyond_the_colours_have_other_lines() -> None:
    jobs = [f"job {i}" for i in range(25)]
    looks = {(charts.colour_of(jobs, job), charts.dashes_of(jobs, job)) for job in jobs}
    assert len(looks) == 25


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, length: float) -> None:
    scale = charts.Scale(low, low + length, 0.0, 1.0)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 12
    steps = {round(math.log10(b - a) % 1.0, 3) % 1.0 for a, b in itertools.pairwise(ticks)}
    assert steps <= {0.0, round(math.log10(2), 3), round(math.log10(5), 3)}
    assert all(-1e-6 <= scale(tick) <= 1 + 1e-6 for tick in ticks)


# ---- fleets of which there is little --------------------------------------------------------------------------------
def test_a_fleet_that_is_still_measured_has_a_report(tmp_path: Path) -> None:
    Written(tmp_path, [fleet_folders.job("a")])
    text = text_of(tmp_path, 1.0)
    assert "Nothing is planned yet" in text
    assert "No step has been made yet" in text
    assert "The trials have not ended" in text


def test_a_report_is_written_to_a_file_or_says_why_not(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    page.write(tmp_path, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith('<!DOCTYPE html>\n<html lang="en">')
    with pytest.raises(TraceFileError, match="the report cannot be written to '/nowhere/at/all'"):
        page.write(tmp_path, "/nowhere/at/all")
    with pytest.raises(JournalError, match="holds no fleet"):
        page.write(tmp_path / "a", tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()
