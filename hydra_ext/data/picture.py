"""The picture of a tuned pipeline: rates, workers, queues and memory over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hydra_ext.data.tuning.views import Interval
from hydra_ext.schedule.chart import new_figure, write

_LIMIT = "#c0392b"
_WIDTH, _HEIGHT = 10.0, 9.0  # inches


def save(stages: Sequence[str], intervals: Sequence[Interval], path: str | os.PathLike[str]) -> None:
    """
    Raises:
        MissingDependency: matplotlib is not installed.
        TraceFileError: The file cannot be written.
    """
    write(figure_of(stages, intervals), path)


def figure_of(stages: Sequence[str], intervals: Sequence[Interval]) -> Any:
    """Four charts on one time axis. Raises MissingDependency if matplotlib is not installed."""
    figure = new_figure("a tuned pipeline", figsize=(_WIDTH, _HEIGHT))
    rates, workers, queues, memory = figure.subplots(4, 1, sharex=True)
    ends = [each.end for each in intervals]
    views = [each.view for each in intervals]
    rates.plot(ends, [view.rate for view in views], color="#3fa66b", label="items a second")
    rates.plot(ends, [view.pace() for view in views], color="#9d9d9d", linestyle="--", label="that training takes")
    for index, name in enumerate(stages):
        colour = f"C{index % 10}"
        workers.step(ends, [view.stages[index].workers for view in views], where="post", color=colour, label=name)
        queues.plot(ends, [100 * view.stages[index].ready for view in views], color=colour, label=name)
        bound = [each.end for each in intervals if each.view.binding() == index]
        workers.plot(bound, [0.0] * len(bound), linestyle="", marker="|", color=colour)
    memory.plot(ends, [view.memory / 2**20 for view in views], color="#5b8def", label="taken")
    memory.plot(ends, [view.limit / 2**20 for view in views], color=_LIMIT, label="limit")
    texts = ("items a second", "workers; | below: binds", "queue, % ready", "memory, MiB")
    for axes, text in zip((rates, workers, queues, memory), texts, strict=True):
        axes.set_ylabel(text, fontsize=8)
        axes.set_ylim(bottom=0 if axes is not workers else -0.5)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    memory.set_xlabel("seconds since the first iteration began", fontsize=8)
    return figure
