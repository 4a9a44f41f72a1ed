"""The charts of a report, as SVG inside HTML: their colours are those of the page, dark or light."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element, SubElement

from hydra_ext.fleet.reporting.bars import Bar, Mark, Row

COLOURS = 10  # of jobs; further jobs have the same ones again, with other lines
_WIDTH, _LEFT, _RIGHT = 960.0, 92.0, 16.0
_ROW, _BAR = 26.0, 20.0  # heights
_HEADING = 24.0
_AXIS = 44.0
_CHARACTER = 6.7  # width
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_CURVE_HEIGHT = 300.0
_BUCKETS = 400  # of a curve, each with its least and its largest loss


class Scale:
    """From numbers to places: linear."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1.0
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self, count: int = 8) -> list[float]:
        """Round numbers, about ``count`` of them."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Chart:
    """An SVG that assistive technology reads as one picture with a name and a description."""

    def __init__(self, name: str, title: str, description: str, height: float) -> None:
        self.root = Element(
            "svg",
            {
                "viewBox": f"0 0 {_WIDTH:g} {height:g}",
                "role": "img",
                "aria-labelledby": f"{name}-title {name}-description",
                "class": "chart",
            },
        )
        SubElement(self.root, "title", id=f"{name}-title").text = title
        SubElement(self.root, "desc", id=f"{name}-description").text = description

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> None:
        found = SubElement(self.root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
        if kind:
            found.set("class", kind)
        found.text = text

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        places = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        SubElement(self.root, "line", {**{key: f"{at:.1f}" for key, at in places.items()}, "class": kind})

    def rectangle(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        sizes = {"x": x, "y": y, "width": width, "height": height}
        found = SubElement(self.root, "rect", {**{key: f"{size:.2f}" for key, size in sizes.items()}, "class": kind})
        if tip:
            SubElement(found, "title").text = tip

    def path(self, drawn: str, kind: str, tip: str, *, dashes: str = "") -> None:
        found = SubElement(self.root, "path", {"d": drawn, "class": kind})
        if dashes:
            found.set("stroke-dasharray", dashes)
        SubElement(found, "title").text = tip


def colour_of(jobs: Sequence[str], job: str) -> int:
    return list(jobs).index(job) % COLOURS


def dashes_of(jobs: Sequence[str], job: str) -> str:
    return _DASHES[list(jobs).index(job) // COLOURS % len(_DASHES)]


# ---- who had which device -------------------------------------------------------------------------------------------
def gantt(
    jobs: Sequence[str],
    rows: Sequence[Row],
    panels: Mapping[str, Sequence[Bar]],
    marks: Sequence[Mark],
    *,
    seconds: float,
    trials: float,
    description: str,
) -> Element:
    """Bars by device and time, in panels one above the other, on one time axis.

    Args:
        jobs: All names, whose places give the colours.
        panels: The bars of each, by its heading.
        marks: Of moves, in the last panel.
        seconds: The end of the time axis.
        trials: The end of the trials.
    """
    height = len(panels) * (_HEADING + _ROW * len(rows)) + _AXIS
    chart = Chart("gantt", "Jobs by device and time", description, height)
    scale = Scale(0.0, seconds, _LEFT, _WIDTH - _RIGHT)
    for tick in scale.ticks():
        chart.line(scale(tick), _HEADING, scale(tick), height - _AXIS, "grid")
        chart.text(scale(tick), height - _AXIS + 16, f"{tick:g}", anchor="middle")
    chart.text((_LEFT + _WIDTH) / 2, height - 8, "seconds from the fleet's beginning", anchor="middle", kind="quiet")
    top = 0.0
    for heading, bars in panels.items():
        chart.text(_LEFT, top + 16, heading, kind="heading")
        if trials:
            width = scale(trials) - _LEFT
            chart.rectangle(_LEFT, top + _HEADING, width, _ROW * len(rows), "trials", f"trials, until {trials:.4g} s")
            if width > 6 * _CHARACTER:
                chart.text(_LEFT + width / 2, top + _HEADING + _ROW * len(rows) / 2 + 4, "trials", anchor="middle")
        tops = {row: top + _HEADING + number * _ROW for number, row in enumerate(rows)}
        for (node, device), place in tops.items():
            chart.text(_LEFT - 8, place + _ROW / 2 + 4, f"{node}:{device}", anchor="end")
        for bar in bars:
            _draw_bar(chart, jobs, bar, tops[bar.row], scale)
        for bar in bars:  # after all of them, or the next one would cover half of it
            if bar.failure is not None:
                x, middle = scale(bar.end), tops[bar.row] + _ROW / 2
                failed = f"{bar.job} has failed: {bar.failure}"
                chart.path(f"M{x - 5:.1f} {middle - 5:.1f}l10 10m0 -10l-10 10", "failure", failed)
        top += _HEADING + _ROW * len(rows)
    for mark in marks:
        _draw_move(chart, scale(mark.at), tops[mark.row] + _ROW / 2, mark.text)
    return chart.root


def _draw_bar(chart: Chart, jobs: Sequence[str], bar: Bar, top: float, scale: Scale) -> None:
    height = _BAR / bar.parts
    left, right, y = scale(bar.start), scale(bar.end), top + (_ROW - _BAR) / 2 + bar.part * height
    width = max(right - left, 1.0)
    chart.rectangle(left, y, width, height, f"bar fill{colour_of(jobs, bar.job)}", bar.text)
    room = int((width - 6) / _CHARACTER)
    if len(bar.job) <= room and bar.parts == 1:
        chart.text(left + 4, y + _BAR / 2 + 4, bar.job, kind="inside")


def _draw_move(chart: Chart, x: float, y: float, text: str) -> None:
    chart.path(f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z", "move", text)


# ---- losses ---------------------------------------------------------------------------------------------------------
def curves(losses: Mapping[str, Mapping[int, float]], *, description: str) -> Element:
    """Losses by step, a line for each job."""
    shown = {job: [(step, own[step]) for step in sorted(own)] for job, own in losses.items()}
    finite = [loss for points in shown.values() for _, loss in points if math.isfinite(loss)]
    chart = Chart("losses", "Loss by step", description, _CURVE_HEIGHT)
    bottom = _CURVE_HEIGHT - _AXIS
    last = max((points[-1][0] for points in shown.values() if points), default=1)
    across = Scale(1.0, float(last), _LEFT, _WIDTH - _RIGHT)
    up = Scale(min(finite, default=0.0), max(finite, default=1.0), bottom, 12.0)
    for tick in up.ticks(6):
        chart.line(_LEFT, up(tick), _WIDTH - _RIGHT, up(tick), "grid")
        chart.text(_LEFT - 8, up(tick) + 4, f"{tick:.4g}", anchor="end")
    for tick in across.ticks():
        chart.text(across(tick), bottom + 16, f"{tick:g}", anchor="middle")
    chart.text((_LEFT + _WIDTH) / 2, _CURVE_HEIGHT - 8, "step", anchor="middle", kind="quiet")
    jobs = list(shown)
    for job, points in shown.items():
        drawn = "".join(_polyline(_thinned(points), across, up))
        if drawn:
            chart.path(drawn, f"curve line{colour_of(jobs, job)}", job, dashes=dashes_of(jobs, job))
    return chart.root


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most the least and the largest loss of each bucket of steps, so that no peak is lost."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    borders = [len(points) * number // _BUCKETS for number in range(_BUCKETS + 1)]
    kept: list[tuple[int, float]] = []
    for begin, end in pairwise(borders):
        bucket = points[begin:end]
        key = [(math.inf if math.isnan(loss) else loss) for _, loss in bucket]
        kept += [bucket[place] for place in sorted({key.index(min(key)), key.index(max(key))})]
    return kept


def _polyline(points: Sequence[tuple[int, float]], across: Scale, up: Scale) -> Iterator[str]:
    """A path with gaps where losses are no finite numbers."""
    is_on = False
    for step, loss in points:
        if math.isfinite(loss):
            place = f"{across(step):.1f} {up(loss):.1f}"
            yield f"L{place}" if is_on else f"M{place}l0 0"  # a dot, if nothing follows
        is_on = math.isfinite(loss)
