"""The picture of a planned step: device bytes over its segments, and how long each lane is busy."""

from __future__ import annotations

import os
from typing import Any

from hydra_ext.plan import Plan
from hydra_ext.schedule.chart import new_figure, write

_TERMS = (  # of a point, from the bottom
    ("buffers", "buffers", "#9d9d9d"),
    ("stash", "stash", "#8e6bbf"),
    ("kept", "activations that stay", "#5b8def"),
    ("weights", "weights in use", "#3fa66b"),
    ("in_use", "activations in use", "#9dbcf7"),
    ("gradients", "gradients", "#f2a03d"),
)
_LIMIT = "#c0392b"


def draw(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a PNG.

    Raises:
        MissingDependency: matplotlib is not installed.
        TraceFileError: The file cannot be written.
    """
    figure = new_figure("a plan", figsize=(9.0, 5.2))
    memory, lanes = figure.subplots(2, height_ratios=(3.4, 1.0))
    _draw_memory(memory, plan)
    _draw_lanes(lanes, plan)
    for axes in (memory, lanes):
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    write(figure, path)


def _draw_memory(axes: Any, plan: Plan) -> None:
    unit, name = (2**30, "GiB") if plan.budget >= 2**30 else (2**20, "MiB")
    points = [*plan.memory, plan.memory[-1]]  # the last one has an end, too
    drawn = [term for term in _TERMS if any(getattr(point, term[0]) for point in points)]
    axes.stackplot(
        range(len(points)),
        [[getattr(point, attribute) / unit for point in points] for attribute, _, _ in drawn],
        labels=[label for _, label, _ in drawn],
        colors=[colour for _, _, colour in drawn],
        step="post",
    )
    axes.axhline(plan.budget / unit, color=_LIMIT, linestyle="--", label="budget")
    forward = sum(point.way == "forward" for point in plan.memory)
    axes.axvline(forward, ymax=0.8, color="black", linewidth=0.8)
    axes.set_xlim(0, len(plan.memory))
    axes.set_ylim(0, 1.25 * plan.budget / unit)
    axes.set_xlabel("segments in the order in which they run: forward up to the line, then backward", fontsize=8)
    axes.set_ylabel(f"device memory, {name}", fontsize=8)
    axes.legend(loc="upper right", ncols=7, fontsize=7, frameon=False)
    axes.set_title(
        f"A round of {plan.round_size} of {plan.microbatches} microbatches; free room holds more weights",
        fontsize=9,
        loc="left",
    )


def _draw_lanes(axes: Any, plan: Plan) -> None:
    names = list(plan.lanes)
    axes.barh(names, [plan.lanes[name] for name in names], color=["#5b8def", "#3fa66b", "#f2a03d"], height=0.6)
    axes.axvline(plan.seconds, color="black", linewidth=0.8)
    axes.text(plan.seconds, 1.0, "the step ends ", transform=axes.get_xaxis_transform(), fontsize=8, ha="right")
    axes.set_xlim(0, 1.02 * plan.seconds)
    axes.invert_yaxis()
    axes.set_xlabel("seconds that each lane is busy in a step", fontsize=8)
