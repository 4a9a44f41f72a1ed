"""Watches a pipeline while it is iterated, and changes the workers of its stages.

A thread of its own looks at the pipeline's memory ten times a second. The guard is hard: what is above the limit takes
workers back at once, and a change is made only if the memory that it is expected to take is there. At the end of each
interval the rule decides.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hydra_ext.data.stages.map import Map
from hydra_ext.data.tuning.memory import Account
from hydra_ext.data.tuning.rule import Rule, shed
from hydra_ext.data.tuning.views import Consumer, Interval, StageView, View
from hydra_ext.data.workers.processes import Workshop
from hydra_ext.errors import MemoryLimitTooSmall

_LOOK = 0.1  # seconds between looks at memory
_FEWEST = 8  # items of an interval: with fewer its rate tells little
_SHORTEST, _LONGEST = 0.5, 10.0  # seconds of an interval
_KEPT = 4096  # intervals for the report


@dataclass
class _Seen:
    """Figures of one stage when an interval began."""

    done: int = 0
    seconds: float = 0.0
    service: float = 0.0


class Watch:
    """Makes views of a pipeline, one for each interval."""

    def __init__(self, stages: Sequence[Map], workshop: Workshop, consumer: Consumer, limit: int) -> None:
        self._stages = stages
        self._workshop = workshop
        self._consumer = consumer
        self._seen = [_Seen() for _ in stages]
        self._items = 0
        self._waited = 0.0
        self._highest = 0  # bytes of this interval
        self.account = Account(workshop)
        self.limit = limit
        self.at = time.perf_counter()

    @property
    def items(self) -> int:
        """That the consumer has taken in this interval."""
        return self._consumer.items - self._items

    def memory(self) -> int:
        """Bytes of all processes and results now. The room for results follows from it."""
        processes = self.account.processes()
        if processes + self.account.results() > self.limit:
            processes = self.account.count()
        region = self._workshop.region
        region.limit = max(0, min(region.most, self.limit - processes))
        taken = processes + self.account.results()
        self._highest = max(self._highest, taken)
        return taken

    def view(self) -> View:
        """What happened since the last one."""
        now, items, waited = time.perf_counter(), self._consumer.items, self._consumer.waited
        seconds, self.at = now - self.at, now
        view = View(
            stages=[self._stage(stage, seen) for stage, seen in zip(self._stages, self._seen, strict=True)],
            rate=(items - self._items) / seconds,
            starved=min(1.0, (waited - self._waited) / seconds),
            memory=max(self.memory(), self._highest),
            limit=self.limit,
        )
        self._items, self._waited, self._highest = items, waited, 0
        return view

    def _stage(self, stage: Map, seen: _Seen) -> StageView:
        figures, items = stage.worker_figures(), stage.item_figures()
        if figures is None or items is None or not figures.done:
            return StageView(stage.workers, 0.0, self.worker_bytes(stage))
        done, seconds = figures.done - seen.done, figures.seconds - seen.seconds
        seen.done, seen.seconds = figures.done, figures.seconds
        if done:
            seen.service = seconds / done
        return StageView(
            workers=stage.workers,
            service=seen.service * figures.done / max(1, self._consumer.items),
            worker_bytes=self.worker_bytes(stage),
            ready=items.ready / items.depth,
        )

    def worker_bytes(self, stage: Map) -> int:
        """Bytes of one more worker of a stage, with the results that it has on the way."""
        own = self.account.own(stage.name) if stage.method == "process" else 0
        figures = stage.worker_figures()
        if figures is None or not figures.done:
            return own
        return own + stage.per_worker * figures.nbytes // figures.done


class Tuner:
    """
    Args:
        stages: Whose workers it changes. Each begins with one.
        consumer: Of the pipeline's items.
        limit: Most bytes of all worker processes and their results.
    """

    def __init__(self, stages: Sequence[Map], workshop: Workshop, consumer: Consumer, limit: int) -> None:
        self._stages = stages
        self._workshop = workshop
        self._consumer = consumer
        self._limit = limit
        self._rule = Rule()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._intervals: deque[Interval] = deque(maxlen=_KEPT)
        for stage in stages:
            stage.workers = 1

    def begin(self) -> None:
        """Goes on beside an iteration that begins."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="hydra_ext tuner", daemon=True)
            self._thread.start()

    def ask_to_end(self) -> None:
        self._ended.set()

    def end(self) -> None:
        self.ask_to_end()
        if self._thread is not None:
            self._thread.join()

    def intervals(self) -> tuple[Interval, ...]:
        """The last ones."""
        return tuple(self._intervals)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        watch = Watch(self._stages, self._workshop, self._consumer, self._limit)
        begun = watch.at
        while not watch.items and not self._ended.wait(_LOOK):
            self._guard(watch)
        self._settle(watch)
        while not self._ended.wait(_LOOK):
            self._guard(watch)
            length = time.perf_counter() - watch.at
            if length > _LONGEST and not watch.items:
                watch.view()  # nothing is asked for: what comes next begins anew
            if length < _SHORTEST or watch.items < _FEWEST:
                continue
            begin = watch.at - begun
            view = watch.view()
            workers = self._rule.decide(view)
            self._intervals.append(Interval(begin, watch.at - begun, view, workers))
            if self._apply(workers):
                self._settle(watch)

    def _settle(self, watch: Watch) -> None:
        """Leaves some time out: workers begin and what waits in queues is given, so the rate is not that of workers."""
        end = time.perf_counter() + _SHORTEST
        while time.perf_counter() < end and not self._ended.wait(_LOOK):
            self._guard(watch)
        watch.view()

    def _guard(self, watch: Watch) -> None:
        """Takes workers back if more memory is taken than there may be."""
        memory = watch.memory()
        if memory <= self._limit:
            return
        views = [StageView(stage.workers, 0.0, watch.worker_bytes(stage)) for stage in self._stages]
        for stage, view in zip(self._stages, views, strict=True):
            figures = stage.worker_figures()
            leaving = max(0, figures.workers - stage.workers) if figures is not None else 0
            memory -= leaving * view.worker_bytes
        workers = shed(View(views, 0.0, 0.0, memory, self._limit))
        if not self._apply(workers) and memory > self._limit:
            self._consumer.refused = partial(_too_small, memory, self._limit)

    def _apply(self, workers: Sequence[int]) -> bool:
        changed = [(stage, count) for stage, count in zip(self._stages, workers, strict=True) if count != stage.workers]
        for stage, count in changed:
            stage.workers = count
        return bool(changed)


def _too_small(needed: int, limit: int) -> MemoryLimitTooSmall:
    return MemoryLimitTooSmall(
        f"with one worker for each stage the pipeline takes {needed} bytes, and it may take {limit}: give a larger "
        "memory=, or fewer stages with processes, or make smaller samples",
        needed=needed,
        limit=limit,
    )
