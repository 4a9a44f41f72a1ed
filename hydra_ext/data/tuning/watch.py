"""What a tuner sees of a pipeline: views, interval by interval, and its memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hydra_ext.data.stages.map import Map
from hydra_ext.data.tuning.memory import Account
from hydra_ext.data.tuning.views import Consumer, StageView, View
from hydra_ext.data.workers.processes import Workshop

_PAUSE = 2.0  # seconds: a shorter gap between two items is no pause
_SLACK = 2**20  # bytes that results leave of the limit, for what processes grow between two looks


class _Seen:
    """Figures of one stage when an interval began."""

    def __init__(self) -> None:
        self.first = 0  # done before the first interval
        self.done = 0
        self.seconds = 0.0
        self.service = 0.0


class Watch:
    """Makes views of a pipeline, one for each interval. Used by one thread."""

    def __init__(self, stages: Sequence[Map], workshop: Workshop, consumer: Consumer, limit: int) -> None:
        self._stages = stages
        self._workshop = workshop
        self._consumer = consumer
        self._seen = [_Seen() for _ in stages]
        self._first = 0  # items before the first interval
        self._items = 0
        self._waited = 0.0
        self._highest = 0  # bytes of this interval
        self._account = Account(workshop)
        self.limit = limit
        self.at = time.perf_counter()

    @property
    def items(self) -> int:
        """That the consumer has taken in this interval."""
        return self._consumer.items - self._items

    @property
    def pauses(self) -> bool:
        """Whether the consumer did something else for most of this interval, such as an evaluation."""
        return self._consumer.gap > max(_PAUSE, 0.5 * (time.perf_counter() - self.at))

    def begin(self) -> None:
        """Begins the first interval: what was made before filled the queues."""
        self._first = self._consumer.items
        for stage, seen in zip(self._stages, self._seen, strict=True):
            figures = stage.worker_figures()
            seen.first = 0 if figures is None else figures.done
        self._account.begin()
        self.again()

    def again(self) -> None:
        """Begins another interval. What happened in this one does not count."""
        self.view()

    def view(self) -> View:
        """What happened in this interval. The next one begins."""
        now, items, waited = time.perf_counter(), self._consumer.items, self._consumer.waited
        seconds, self.at = now - self.at, now
        view = View(
            stages=[self._stage(stage, seen) for stage, seen in zip(self._stages, self._seen, strict=True)],
            rate=(items - self._items) / seconds,
            starved=min(1.0, (waited - self._waited) / seconds),
            memory=max(self.memory(), self._highest),
            limit=self.limit,
        )
        self._items, self._waited, self._highest, self._consumer.gap = items, waited, 0, 0.0
        return view

    def _stage(self, stage: Map, seen: _Seen) -> StageView:
        figures, items = stage.worker_figures(), stage.item_figures()
        if figures is None or items is None or not figures.done:
            return StageView(stage.workers, 0.0, self.worker_bytes(stage))
        done, seconds = figures.done - seen.done, figures.seconds - seen.seconds
        seen.done, seen.seconds = figures.done, figures.seconds
        if done:
            seen.service = seconds / done
        taken = self._consumer.items - self._first
        return StageView(
            workers=stage.workers,
            service=seen.service * (figures.done - seen.first) / taken if taken else 0.0,
            worker_bytes=self.worker_bytes(stage),
            ready=items.ready / items.depth,
        )

    # ---- memory -----------------------------------------------------------------------------------------------------

    def memory(self) -> int:
        """Bytes of all processes and results now. The room for results follows from it."""
        processes, region = self._account.processes(), self._workshop.region
        if processes + region.allocated > self.limit:
            processes = self._account.count()
        region.limit = max(0, min(region.most, self.limit - processes - _SLACK))
        taken = processes + self._account.shared()
        self._highest = max(self._highest, taken)
        return taken

    def forget_memory(self) -> None:
        """Because workers were taken back: the most of this interval is not what there will be."""
        self._highest = 0

    def needed(self) -> int:
        """Bytes without which no item comes: of the processes, and of one result."""
        return self._account.count() + self._workshop.largest

    def worker_bytes(self, stage: Map) -> int:
        """Bytes of one more worker of a stage, with the results that it has on the way."""
        own = self._account.own(stage.name) if stage.method == "process" else 0
        figures = stage.worker_figures()
        if figures is None or not figures.done:
            return own
        return own + stage.per_worker * figures.nbytes // figures.done

    def leaving(self) -> int:
        """Bytes of workers that are still there, and that are not wanted any more."""
        found = 0
        for stage in self._stages:
            figures = stage.worker_figures()
            if figures is not None:
                found += max(0, figures.workers - stage.workers) * self.worker_bytes(stage)
        return found
