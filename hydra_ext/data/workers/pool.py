"""Workers of one stage: as many as are wanted now, which take tasks in order and tell when they are done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hydra_ext.data.places import Place


@dataclass(frozen=True)
class Task:
    """An item to be made something of.

    Attributes:
        flow: Number of the flow of items that it belongs to.
        number: In the flow. Results are given in this order.
    """

    flow: int
    number: int
    place: Place
    item: Any


@dataclass(frozen=True)
class Made:
    """What a worker has made, and the seconds that it was at work for it."""

    value: Any
    seconds: float
    nbytes: int = 0


@dataclass(frozen=True)
class Raised:
    """Why nothing was made, and the seconds until that was known."""

    error: BaseException
    seconds: float = 0.0


Outcome = Made | Raised


class Worker(Protocol):
    """Makes something of one item at a time. Used by one thread."""

    def call(self, task: Task, is_next: Callable[[], bool]) -> Made:
        """
        Args:
            is_next: Whether this task's result is the next one to be given, which others wait for.
        """

    def close(self) -> None:
        """Releases what the worker has. It has no task."""


@dataclass(frozen=True)
class WorkerFigures:
    """What a pool does now, and has done so far.

    Attributes:
        workers: That are there.
        busy: That have a task.
        waiting: Tasks that no worker has yet.
        done: Tasks that were done.
        seconds: That they took, together.
        nbytes: Of their results.
    """

    workers: int
    busy: int
    waiting: int
    done: int
    seconds: float
    nbytes: int


class Pool:
    """
    Args:
        name: Of its threads.
        make: Makes a worker, in the thread that will use it.
        tell: Called with each task and its outcome, by the worker's thread. It takes the outcome
            out of its list, so that this thread keeps nothing that the consumer has let go.
        is_next: Whether a task's result is the next one to be given.
        workers: Number of workers.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Worker],
        tell: Callable[[Task, list[Outcome]], None],
        is_next: Callable[[Task], bool],
        *,
        workers: int,
    ) -> None:
        self._name = name
        self._make = make
        self._tell = tell
        self._is_next = is_next
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._threads: set[threading.Thread] = set()
        self._wanted = workers
        self._busy = 0
        self._done = 0
        self._seconds = 0.0
        self._nbytes = 0

    @property
    def workers(self) -> int:
        """Number of workers. One that has a task leaves behind it."""
        return self._wanted

    def resize(self, workers: int) -> None:
        with self._changed:
            self._wanted = workers
            self._fill()
            self._changed.notify_all()

    def put(self, task: Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._fill()
            self._changed.notify()

    def drop(self) -> None:
        """Forgets tasks that no worker has. Outcomes of the others are still told."""
        with self._changed:
            self._tasks.clear()

    def close(self) -> None:
        """Waits until all workers have left."""
        with self._changed:
            threads = list(self._threads)
        self.drop()
        self.resize(0)
        for thread in threads:
            thread.join()

    def figures(self) -> WorkerFigures:
        with self._changed:
            return WorkerFigures(
                workers=len(self._threads),
                busy=self._busy,
                waiting=len(self._tasks),
                done=self._done,
                seconds=self._seconds,
                nbytes=self._nbytes,
            )

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts the workers that are wanted. Called under the lock."""
        while len(self._threads) < self._wanted and self._tasks:
            thread = threading.Thread(target=self._main, name=f"hydra_ext {self._name}", daemon=True)
            thread.start()  # it waits for the lock
            self._threads.add(thread)

    def _main(self) -> None:
        worker: Worker | None = None
        try:
            while (task := self._next()) is not None:
                begun = time.perf_counter()
                try:
                    worker = worker or self._make()
                    outcome: list[Outcome] = [worker.call(task, lambda task=task: self._is_next(task))]  # type: ignore[misc]
                except BaseException as error:  # noqa: BLE001 - raised where the result is taken
                    outcome = [Raised(error, time.perf_counter() - begun)]
                self._finish(task, outcome)
                del task, outcome  # a worker that waits keeps nothing alive
        finally:
            if worker is not None:
                worker.close()

    def _next(self) -> Task | None:
        """The next task; None if this worker is to leave."""
        with self._changed:
            while len(self._threads) <= self._wanted:
                if self._tasks:
                    self._busy += 1
                    return self._tasks.popleft()
                self._changed.wait()
            self._threads.discard(threading.current_thread())
            return None

    def _finish(self, task: Task, outcome: list[Outcome]) -> None:
        with self._changed:
            self._busy -= 1
            self._done += 1
            self._seconds += outcome[0].seconds
            if isinstance(outcome[0], Made):
                self._nbytes += outcome[0].nbytes
        self._tell(task, outcome)
