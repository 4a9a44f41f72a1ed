"""What a tuner sees of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STARVED = 0.02  # share of the time: below, the consumer has what it wants


@dataclass(frozen=True)
class StageView:
    """A stage over one interval.

    Attributes:
        workers: That it has.
        service: Seconds of its workers for one item of the consumer's; 0 if none was made yet.
        worker_bytes: Of one more worker, with what it has on the way.
        ready: Share of its queue that waited for the next stage, at the interval's end.
    """

    workers: int
    service: float
    worker_bytes: int
    ready: float = 0.0


@dataclass(frozen=True)
class View:
    """A pipeline over one interval.

    Attributes:
        rate: Items a second that the consumer took.
        starved: Share of the interval in which the consumer waited for an item.
        memory: Bytes of all workers and what they have made.
        limit: The most that it may be.
    """

    stages: Sequence[StageView]
    rate: float
    starved: float
    memory: int
    limit: int

    def binding(self) -> int | None:
        """The stage whose workers are able to do least, if the consumer waited; else None: the consumer binds."""
        known = [index for index, stage in enumerate(self.stages) if stage.service]
        if self.starved <= STARVED or not known:
            return None
        return min(known, key=lambda index: self.stages[index].workers / self.stages[index].service)

    def pace(self) -> float:
        """Items a second that the consumer would take if it never waited."""
        return self.rate / max(1e-3, 1 - self.starved)


@dataclass(frozen=True)
class Interval:
    """What happened from one decision of a tuner to the next.

    Attributes:
        begin: Seconds since the first iteration began.
        end: In the same seconds.
        view: The pipeline.
        workers: Of each stage, from then on.
    """

    begin: float
    end: float
    view: View
    workers: Sequence[int]


class Consumer:
    """What the consumer has taken, counted where it takes it."""

    def __init__(self) -> None:
        self.items = 0
        self.waited = 0.0  # seconds
        self.gap = 0.0  # the most seconds between two items, in which it did not wait; the tuner sets it back
        self._last = 0.0  # when it took an item
        self.refused: Callable[[], Exception] | None = None  # makes what is raised instead of the next item

    def took(self, waited: float) -> None:
        now = time.perf_counter()
        if self._last:
            self.gap = max(self.gap, now - waited - self._last)
        self._last = now
        self.items += 1
        self.waited += waited
