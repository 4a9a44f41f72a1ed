"""What a loader tells of its stages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ext.data import picture
from hydra_ext.data.stages.ahead import ItemFigures
from hydra_ext.data.tuning.views import Interval
from hydra_ext.data.workers.pool import WorkerFigures
from hydra_ext.notebooks import Bar, html_of, seconds_said, size_said


@dataclass(frozen=True)
class StageReport:
    """A stage now, and what it has done.

    Attributes:
        name: Of the stage.
        items: On the way, since the epoch began; None before the first one.
        workers: None for a stage without workers, and before the first item. A closed loader has none at work.
        skipped: Items whose function has raised, and that were left out.
    """

    name: str
    items: ItemFigures | None
    workers: WorkerFigures | None
    skipped: int


@dataclass(frozen=True)
class TuningReport:
    """What a tuner saw and did.

    Attributes:
        stages: Names, in the order of the data.
        intervals: The last ones, at most 4096.
    """

    stages: Sequence[str]
    intervals: Sequence[Interval]

    def binding(self) -> list[str]:
        """What the rate of each interval depended on: the name of a stage, or ``"training"``."""
        found = []
        for interval in self.intervals:
            stage = interval.view.binding()
            found.append("training" if stage is None else self.stages[stage])
        return found

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draws workers, queues, memory and rates over time as a PNG.

        Raises:
            MissingDependency: matplotlib is not installed.
            TraceFileError: The file cannot be written.
        """
        picture.save(self.stages, self.intervals, path)

    def __str__(self) -> str:
        if not self.intervals:
            return "not tuned yet"
        last = self.intervals[-1]
        view, binds = last.view, self.binding()[-1]
        taken = f"{view.memory / 2**20:.0f} of {view.limit / 2**20:.0f} MiB"
        workers = ", ".join(f"{name} {count}" for name, count in zip(self.stages, last.workers, strict=True))
        pace = f"{view.rate:.1f} items a second, of {view.pace():.1f} that training takes"
        return f"{pace}; {binds} binds; workers: {workers}; {taken}"


@dataclass(frozen=True)
class LoaderReport:
    """A loader now, and what it has done; of a closed one, what it had done.

    Attributes:
        stages: In the order of the data. The last one's ``items.starved_seconds`` are those that the training waited.
        shared_bytes: Memory that workers and the training share, in use.
        shared_limit: The most that it may be.
        inline: Results that found no room there, and travelled by themselves.
        deaths: Workers that have died and were replaced.
        tuning: None if the loader is not tuned.
    """

    stages: tuple[StageReport, ...]
    shared_bytes: int
    shared_limit: int
    inline: int
    deaths: int
    tuning: TuningReport | None = None

    def __str__(self) -> str:
        shared = f"{self.shared_bytes / 2**20:.1f} of {self.shared_limit / 2**20:.1f} MiB shared"
        lines = [*map(_line, self.stages), f"{shared}, {self.inline} results beside it, {self.deaths} workers replaced"]
        if self.tuning is not None:
            lines.append(str(self.tuning))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        spent = {stage.name: stage.workers.seconds for stage in self.stages if stage.workers is not None}
        bars = [Bar("work of all workers", spent, seconds_said)]
        if self.tuning is not None and self.tuning.intervals:
            view = self.tuning.intervals[-1].view
            bars.append(Bar("memory", {"processes and results": view.memory}, size_said, whole=view.limit))
        return html_of(str(self), *bars)


def _line(stage: StageReport) -> str:
    parts = []
    if stage.workers is not None:
        workers = stage.workers
        parts.append(
            f"{workers.busy} of {workers.workers} workers busy, {workers.done} made in {workers.seconds:.2f} s"
        )
    if stage.items is not None:
        items = stage.items
        parts.append(f"{items.ready} of {items.depth} items ready, waited for {items.starved_seconds:.2f} s")
    return f"{stage.name}: " + (", ".join(parts) or "not begun")
