"""Watches a pipeline while it is iterated, and changes the workers of its stages.

A thread of its own looks at the pipeline's memory ten times a second. The guard is hard: what is above the limit takes
workers back at once, and a change is made only if the memory that it is expected to take is there. At the end of each
interval the rule decides.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

from hydra_ext.data.stages.map import Map
from hydra_ext.data.tuning.memory import expect_counted
from hydra_ext.data.tuning.rule import Rule, shed
from hydra_ext.data.tuning.views import Consumer, Interval, StageView, View
from hydra_ext.data.tuning.watch import Watch
from hydra_ext.data.workers.processes import Workshop
from hydra_ext.errors import MemoryLimitTooSmall, StateError

_LOOK = 0.1  # seconds between looks at memory
_LOOKS = 5  # one after the other, that make sure that a limit is too small
_FEWEST = 8  # items of an interval: with fewer its rate tells little
_SHORTEST = 0.5  # seconds of an interval
_KEPT = 4096  # intervals for the report


class Tuning:
    """What a loader and its iterations hold. The tuner ends when nothing holds it any more.

    Args:
        stages: Whose workers are tuned. Each begins with one.
        consumer: Of the pipeline's items.
        limit: Most bytes of all worker processes and their results.

    Raises:
        StateError: This system does not tell what processes take.
    """

    def __init__(self, stages: Sequence[Map], workshop: Workshop, consumer: Consumer, limit: int) -> None:
        expect_counted()
        self._tuner = _Tuner(stages, workshop, consumer, limit)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tuner.ask_to_end)
        for stage in stages:
            stage.workers = 1

    def begin(self) -> None:
        """Goes on beside an iteration that begins."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._tuner.main, name="hydra_ext tuner", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._tuner.ended.set()
        if self._thread is not None:
            self._thread.join()

    def intervals(self) -> tuple[Interval, ...]:
        """The last ones."""
        return tuple(self._tuner.intervals)


class _Tuner:
    """The thread's part."""

    def __init__(self, stages: Sequence[Map], workshop: Workshop, consumer: Consumer, limit: int) -> None:
        self._stages = stages
        self._consumer = consumer
        self._watch = Watch(stages, workshop, consumer, limit)
        self._limit = limit
        self._rule = Rule()
        self._above = 0  # looks that found too much memory, one after the other
        self._is_over = False
        self.ended = threading.Event()
        self.intervals: deque[Interval] = deque(maxlen=_KEPT)

    def ask_to_end(self) -> None:
        """Called wherever the collector runs, also in this thread while it waits: so it takes no lock."""
        self._is_over = True

    def main(self) -> None:
        try:
            self._tune()
        except Exception as error:  # noqa: BLE001 - without its guard the pipeline must not go on
            what = f"{type(error).__name__}: {error}"
            self._consumer.refused = partial(StateError, f"the workers of this loader are not tuned any more: {what}")

    def _tune(self) -> None:
        watch = self._watch
        watch.at = begun = time.perf_counter()
        while not watch.items and not self._ends():
            self._guard()
        self._settle()
        watch.begin()
        while not self._ends():
            self._guard()
            if time.perf_counter() - watch.at < _SHORTEST or watch.items < _FEWEST:
                continue
            if watch.pauses:
                watch.again()
                continue
            begin = watch.at - begun
            view = watch.view()
            workers = self._rule.decide(view)
            self.intervals.append(Interval(begin, watch.at - begun, view, workers))
            if self._apply(workers):
                self._settle()
                watch.again()

    def _ends(self) -> bool:
        """Waits until the next look. Returns whether there is none."""
        return self.ended.wait(_LOOK) or self._is_over

    def _settle(self) -> None:
        """Lets workers begin, and what waits in queues be given: the rate of this time is not that of the workers."""
        end = time.perf_counter() + _SHORTEST
        while time.perf_counter() < end and not self._ends():
            self._guard()

    def _guard(self) -> None:
        """Takes workers back if more memory is taken than there may be."""
        leaving = self._watch.leaving()
        memory = self._watch.memory() - leaving
        views = [StageView(stage.workers, 0.0, self._watch.worker_bytes(stage)) for stage in self._stages]
        if memory > self._limit and self._apply(shed(View(views, 0.0, 0.0, memory, self._limit))):
            self._watch.forget_memory()
            return
        if memory <= self._limit or (needed := self._watch.needed() - leaving) <= self._limit:
            self._above, self._consumer.refused = 0, None
            return
        self._above += 1
        if self._above >= _LOOKS:
            self._consumer.refused = partial(_too_small, needed, self._limit)

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
