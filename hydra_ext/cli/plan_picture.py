"""The picture of a planned step: device memory over time, and under it what compute and each lane do when."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra_ext.plan import LaneInterval, MemoryPoint, Plan
from hydra_ext.schedule.chart import new_figure, write

_TERMS = (  # of a point, from the bottom
    ("buffers", "buffers", "#9d9d9d"),
    ("stash", "stash", "#8e6bbf"),
    ("kept", "activations that stay", "#5b8def"),
    ("weights", "weights in use", "#3fa66b"),
    ("in_use", "activations in use", "#9dbcf7"),
    ("gradients", "gradients", "#f2a03d"),
)
_KINDS = {  # of intervals; what moves has the colour that it has in memory
    "forward": "#4bb3c4",
    "recompute": "#e07a8b",
    "backward": "#2f7f95",
    "update": "#b5a642",
    "weights": "#3fa66b",
    "stash": "#8e6bbf",
    "gradients": "#f2a03d",
}
_LIMIT = "#c0392b"
_WIDTH, _MEMORY_HEIGHT, _LANE_HEIGHT = 11.0, 3.4, 0.62  # inches
_PLOT_WIDTH = 9.8  # inches of the time axis, about
_PIXELS = 1200  # of it
_BAR_HEIGHT = 0.8  # of a lane's
_CHARACTER = (0.055, 0.11)  # inches: width and height
_FAR = 2.5  # a budget of more than so many times the peak would leave no room for the curve


@dataclass(frozen=True)
class _Bar:
    kind: str
    segment: str  # empty for several
    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin


def draw(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a PNG.

    Raises:
        MissingDependency: matplotlib is not installed.
        TraceFileError: The file cannot be written.
    """
    write(figure_of(plan), path)


def figure_of(plan: Plan) -> Any:
    """Memory above lanes, on one time axis. Raises MissingDependency if matplotlib is not installed."""
    timeline = plan.timeline()
    scale, unit = _time_unit(plan.seconds)
    heights = (_MEMORY_HEIGHT, 0.4 + _LANE_HEIGHT * len(plan.lanes))
    figure = new_figure("a plan", figsize=(_WIDTH, sum(heights)))
    memory, lanes = figure.subplots(2, sharex=True, height_ratios=heights)
    _draw_memory(memory, plan, timeline.memory, scale)
    _draw_lanes(lanes, plan, timeline.intervals, scale)
    lanes.set_xlim(0, plan.seconds * scale or 1.0)
    lanes.set_xlabel(f"{unit} since the step began", fontsize=8)
    for axes in (memory, lanes):
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "seconds"
    return (1e3, "milliseconds") if seconds >= 1e-3 else (1e6, "microseconds")


def _memory_unit(size: int) -> tuple[int, str]:
    return next((unit for unit in ((2**30, "GiB"), (2**20, "MiB")) if size >= unit[0]), (2**10, "KiB"))


def _size(size: int) -> str:
    unit, name = _memory_unit(size)
    return f"{size / unit:.4g} {name}"


def _draw_memory(axes: Any, plan: Plan, memory: Sequence[tuple[float, MemoryPoint]], scale: float) -> None:
    moments = [*(moment * scale for moment, _ in memory), plan.seconds * scale]
    points = [point for _, point in memory]
    points.append(points[-1])  # the last one has an end, too
    unit, name = _memory_unit(plan.peak_bytes)
    drawn = [term for term in _TERMS if any(getattr(point, term[0]) for point in points)]
    axes.stackplot(
        moments,
        [[getattr(point, attribute) / unit for point in points] for attribute, _, _ in drawn],
        labels=[label for _, label, _ in drawn],
        colors=[colour for _, _, colour in drawn],
        step="post",
        linewidth=0,
    )
    top = plan.peak_bytes
    if plan.budget <= _FAR * plan.peak_bytes:
        top = plan.budget
        axes.axhline(plan.budget / unit, color=_LIMIT, linestyle="--", label="budget")
    axes.set_ylim(0, 1.2 * top / unit or 1.0)
    axes.set_ylabel(f"device memory, {name}", fontsize=8)
    axes.legend(loc="upper right", ncols=7, fontsize=7, frameon=False)
    axes.set_title(
        f"{plan.microbatches} microbatches in rounds of {plan.round_size}; peak {_size(plan.peak_bytes)} of "
        f"{_size(plan.budget)}; free room holds more weights",
        fontsize=9,
        loc="left",
    )


def _draw_lanes(axes: Any, plan: Plan, intervals: Sequence[LaneInterval], scale: float) -> None:
    seconds = plan.seconds
    pixel = seconds / _PIXELS
    short = _short_names({each.segment for each in intervals})
    shown = set()
    for row, name in enumerate(plan.lanes):
        own = [each for each in intervals if each.lane == name]
        bars = _bars(own, pixel)
        for kind, colour in _KINDS.items():
            same = [bar for bar in bars if bar.kind == kind]
            if same:
                axes.broken_barh(
                    [(bar.begin * scale, bar.length * scale) for bar in same],
                    (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
                    facecolors=colour,
                    edgecolors="white",
                    linewidths=[0.5 if bar.length > 4 * pixel else 0.0 for bar in same],
                    label=None if kind in shown else kind,
                )
                shown.add(kind)
        for bar in bars:
            if bar.segment in short:
                _label(axes, row, bar, short[bar.segment], seconds, scale)
    axes.set_ylim(len(plan.lanes) - 0.5, -0.5)
    axes.set_yticks(
        range(len(plan.lanes)),
        labels=[f"{name}\n{busy / seconds if seconds else 0.0:.0%} busy" for name, busy in plan.lanes.items()],
    )
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(_KINDS), fontsize=7, frameon=False, borderaxespad=0.1
    )


def _bars(intervals: Iterable[LaneInterval], pixel: float) -> list[_Bar]:
    """Of one lane. What follows at once and is the same segment's is one bar, and so is what is too short to see."""
    bars: list[_Bar] = []
    for each in intervals:
        bar = _Bar(each.kind, each.segment, each.begin, each.end)
        if not bar.length:
            continue
        last = bars[-1] if bars else None
        if last is not None and last.kind == bar.kind and bar.begin - last.end < pixel:
            same = last.segment == bar.segment
            if same or max(last.length, bar.length) < pixel:
                bars[-1] = replace(last, end=bar.end, segment=bar.segment if same else "")
                continue
        bars.append(bar)
    return bars


def _label(axes: Any, row: int, bar: _Bar, name: str, seconds: float, scale: float) -> None:
    """Writes the segment's name into its bar, or the end of it: along the bar, or else upright, where there is room."""
    inches = bar.length / seconds * _PLOT_WIDTH
    width, height = _CHARACTER
    along = inches / width
    upright = _BAR_HEIGHT * _LANE_HEIGHT / width if inches >= height else 0.0
    for text in (name, ".".join(name.split(".")[-2:])):
        if len(text) <= max(along, upright):
            axes.text(
                (bar.begin + bar.length / 2) * scale,
                row,
                text,
                ha="center",
                va="center",
                fontsize=6,
                color="white",
                rotation=0 if len(text) <= along else 90,
                clip_on=True,
            )
            return


def _short_names(names: set[str]) -> dict[str, str]:
    """Without the parents that all segments have; none for what is not a module."""
    modules = [name for name in names if name and not name.startswith("(")]
    shared = 0
    for parts in zip(*(name.split(".")[:-1] for name in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared += len(parts[0]) + 1
    return {name: name[shared:] for name in modules}
