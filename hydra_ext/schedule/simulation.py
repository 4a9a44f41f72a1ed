"""The times of a simulated schedule, and its pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hydra_ext import _C
from hydra_ext._C import TimedAction
from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule import chart, grid, trace_file


def per_place(name: str, costs: float | Sequence[float], count: int) -> list[float]:
    """One number for every stage or hop."""
    if isinstance(costs, (int, float)):
        return [float(costs)] * count
    if len(costs) != count:
        raise InvalidSchedule(f"{name}: {len(costs)} numbers; give one, or {count}")
    return [float(cost) for cost in costs]


class Simulation:
    """Times of the actions of some steps and a drain, in seconds from the start of the first."""

    def __init__(self, core: _C.Schedule, timeline: _C.Timeline, batches: int) -> None:
        self._core = core
        self._timeline = timeline
        self.batches = batches

    @property
    def actions(self) -> list[TimedAction]:
        """Actions by rank, in order. A send lasts until its value has arrived; a receive takes no time."""
        return self._timeline.actions

    @property
    def makespan(self) -> float:
        return self._timeline.makespan

    @property
    def period(self) -> float:
        """Seconds that a batch adds to the makespan, over the later half of the batches; for one batch the makespan."""
        return self._timeline.period

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each rank in forwards, backwards and updates."""
        return tuple(self._timeline.busy)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of a period in which each rank has nothing to compute."""
        return tuple(self._timeline.bubbles)

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def grid(self, *, column: float | None = None) -> str:
        """Draws ranks by time in text, as papers do. Microbatches are counted through all batches.

        Args:
            column: Seconds of a column; by default those of the shortest forward or backward.
        """
        return grid.draw(self._core, self._timeline, column=column)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draws ranks by time as a PNG.

        Raises:
            MissingDependency: matplotlib is not installed.
            TraceFileError: The file cannot be written.
        """
        chart.save(self._core, self._timeline, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace-event file for https://ui.perfetto.dev, with a process for every rank.

        Raises:
            TraceFileError: The file cannot be written.
        """
        trace_file.save(self._core, self._timeline, path)
