"""What a simulated schedule took, and its pictures."""

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
    """When every action of some steps and a drain ran. Seconds, from the start of the first."""

    def __init__(self, core: _C.Schedule, timeline: _C.Timeline, batches: int) -> None:
        self._core = core
        self._timeline = timeline
        self.batches = batches

    @property
    def actions(self) -> list[TimedAction]:
        """Rank by rank, each in its order. A send lasts until its value has arrived, a receive no time."""
        return self._timeline.actions

    @property
    def makespan(self) -> float:
        return self._timeline.makespan

    @property
    def period(self) -> float:
        """What a batch adds to the makespan, over the later half of the batches; the makespan of a single one."""
        return self._timeline.period

    @property
    def busy(self) -> tuple[float, ...]:
        """Of each rank: in forwards, backwards and updates."""
        return tuple(self._timeline.busy)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Of each rank: the fraction of a period in which it has nothing to compute."""
        return tuple(self._timeline.bubbles)

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def grid(self, *, column: float | None = None) -> str:
        """Ranks by time, as papers draw it, in text. Microbatches are counted through all batches.

        Args:
            column: seconds; the shortest forward or backward unless given.
        """
        return grid.draw(self._core, self._timeline, column=column)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            MissingDependency: matplotlib is not installed.
            TraceFileError: the file cannot be written.
        """
        chart.save(self._core, self._timeline, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """A Chrome trace-event file, which opens in https://ui.perfetto.dev: a process for every rank.

        Raises:
            TraceFileError: the file cannot be written.
        """
        trace_file.save(self._core, self._timeline, path)
