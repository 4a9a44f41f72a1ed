"""What a loader tells of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_ext.data.stages.ahead import ItemFigures
from hydra_ext.data.workers.pool import WorkerFigures


@dataclass(frozen=True)
class StageReport:
    """A stage now, and what it has done.

    Attributes:
        name: Of the stage.
        items: On the way, since the epoch began; None before the first one.
        workers: None for a stage without workers, and before the first item.
        skipped: Items whose function has raised, and that were left out.
    """

    name: str
    items: ItemFigures | None
    workers: WorkerFigures | None
    skipped: int


@dataclass(frozen=True)
class LoaderReport:
    """A loader now, and what it has done.

    Attributes:
        stages: In the order of the data. The last one's ``items.starved_seconds`` are those that the training waited.
        shared_bytes: Memory that workers and the training share, in use.
        shared_limit: The most that it may be.
        inline: Results that found no room there, and travelled by themselves.
        deaths: Workers that have died and were replaced.
    """

    stages: tuple[StageReport, ...]
    shared_bytes: int
    shared_limit: int
    inline: int
    deaths: int

    def __str__(self) -> str:
        shared = f"{self.shared_bytes / 2**20:.1f} of {self.shared_limit / 2**20:.1f} MiB shared"
        lines = [*map(_line, self.stages), f"{shared}, {self.inline} results beside it, {self.deaths} workers replaced"]
        return "\n".join(lines)


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
