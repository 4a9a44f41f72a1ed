"""A simulated schedule as a PNG: ranks by time."""

from __future__ import annotations

import importlib
import os
from typing import Any

from hydra_ext import _C
from hydra_ext._C import ActionKind, TimedAction
from hydra_ext.errors import MissingDependency, TraceFileError
from hydra_ext.schedule.labels import label, shortest, work_by_rank

_COLOURS = {  # for even and odd batches
    ActionKind.FORWARD: ("#5b8def", "#9dbcf7"),
    ActionKind.BACKWARD: ("#3fa66b", "#93d3ae"),
    ActionKind.UPDATE: ("#f2a03d", "#f2a03d"),
}
_NAMES = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.UPDATE: "update"}
_COLUMN_INCHES = 0.24
_LONGEST_INCHES = 60.0


def save(core: _C.Schedule, timeline: _C.Timeline, path: str | os.PathLike[str]) -> None:
    ranks = work_by_rank(core, timeline)
    columns = timeline.makespan / shortest(ranks)
    inches = min(max(columns * _COLUMN_INCHES, 6.0), _LONGEST_INCHES)
    figure = new_figure("a schedule", figsize=(inches, 1.1 + 0.42 * core.ranks))
    axes = figure.subplots()
    for rank, work in enumerate(ranks):
        for timed in work:
            _draw_bar(axes, core, rank, timed)
    axes.set_xlim(0, timeline.makespan or 1.0)
    axes.set_ylim(core.ranks - 0.5, -0.5)
    idle = [f"rank {rank}\n{bubble:.0%} idle" for rank, bubble in enumerate(timeline.bubbles)]
    axes.set_yticks(range(core.ranks), labels=idle, fontsize=7)
    axes.set_xlabel(f"seconds; {timeline.period:g} a batch", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _add_legend(axes, figure, ranks)
    write(figure, path)


def write(figure: Any, path: str | os.PathLike[str]) -> None:
    """Raises TraceFileError if the file cannot be written."""
    try:
        figure.savefig(os.fspath(path), dpi=120, format="png")
    except OSError as error:
        raise TraceFileError(
            f"the picture cannot be written to '{os.fspath(path)}': {error.strerror or error}; give a path in a folder "
            "that exists and may be written to"
        ) from error


def new_figure(subject: str, *, figsize: tuple[float, float]) -> Any:
    """Raises MissingDependency if matplotlib is not installed."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MissingDependency(
            f"the picture of {subject} needs matplotlib, which is not installed: pip install 'hydra-ext[demo]'"
        ) from error
    return figure(figsize=figsize, layout="constrained")


def _draw_bar(axes: Any, core: _C.Schedule, rank: int, timed: TimedAction) -> None:
    colour = _COLOURS[timed.action.kind][timed.action.batch % 2]
    length = timed.end - timed.start
    axes.barh(rank, length, left=timed.start, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
    middle = timed.start + length / 2
    axes.text(middle, rank, label(core, timed.action), ha="center", va="center", fontsize=6, clip_on=True)


def _add_legend(axes: Any, figure: Any, ranks: list[list[TimedAction]]) -> None:
    drawn = {timed.action.kind for work in ranks for timed in work}
    bars = [axes.barh(0, 0, color=_COLOURS[kind][0], label=_NAMES[kind]) for kind in _NAMES if kind in drawn]
    if bars:
        figure.legend(handles=bars, loc="outside upper right", ncols=len(bars), fontsize=7, frameon=False)
