"""A function of each item, by workers whose number may change at any time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Literal

from torchdata.nodes import BaseNode

from hydra_ext.data.places import Place
from hydra_ext.data.stages.ahead import Ahead, Flow, below, expect_positive
from hydra_ext.data.workers.pool import Made, Outcome, Pool, Raised, Task, WorkerFigures
from hydra_ext.data.workers.processes import ProcessWorker, Workshop
from hydra_ext.data.workers.threads import ThreadWorker
from hydra_ext.errors import InvalidArgument, StageFailed

Method = Literal["process", "thread"]
OnError = Literal["raise", "skip"]

_MEMORY = 2**30  # bytes
_count = itertools.count(1)


class Skipped:
    """Stands for an item whose function has raised, where such items are skipped."""


class _Results:
    """Where outcomes of tasks go: to the flow that they belong to, if it is still there."""

    def __init__(self, *, skips: bool) -> None:
        self._flow: weakref.ref[Flow] | None = None
        self._skips = skips
        self.skipped = 0

    def begin(self, flow: Flow) -> None:
        self._flow = weakref.ref(flow)

    def tell(self, task: Task, outcome: list[Outcome]) -> None:
        flow = None if self._flow is None else self._flow()
        if flow is None or flow.start.flow != task.flow:
            return
        first = outcome[0]
        if isinstance(first, Raised) and self._skips and type(first.error) is StageFailed:  # of the function
            self.skipped += 1
            outcome = [Made(Skipped(), 0.0)]
        del first
        flow.finish(task.number, outcome)

    def is_next(self, task: Task) -> bool:
        """Whether a task's result is the next one to be given. One that nothing waits for any more may end, too."""
        flow = None if self._flow is None else self._flow()
        return flow is None or flow.start.flow != task.flow or flow.is_next(task.number)


class Map(Ahead[Any]):
    """Calls a function with each item. Results come in the source's order, whatever the number of workers.

    In processes all random numbers of an item follow from ``seed``, the stage's place in the pipeline, the epoch and
    the item's number: the generators of torch, Python and numpy are seeded before each call. Threads of one process
    share these, so functions in threads draw from :func:`hydra_ext.data.generator` or
    :func:`hydra_ext.data.numpy_generator`.

    Results of processes lie in shared memory, without a copy, as long as they are used. It takes at most 1 GiB, or what
    the node's loader has.

    Args:
        source: Any node of torchdata.
        function: For processes, one that another process can import.
        workers: Number of workers; :attr:`workers` changes it at any time.
        method: ``"process"``, or ``"thread"`` for functions that leave the interpreter lock to others.
        per_worker: Items that may be on the way for each worker.
        seed: Of random numbers.
        on_error: ``"raise"``, or ``"skip"``: items whose function raises are left out and counted.
        name: In reports and messages.

    Raises:
        InvalidArgument: An argument is not as given here.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        function: Callable[[Any], Any],
        *,
        workers: int = 1,
        method: Method = "process",
        per_worker: int = 2,
        seed: int = 0,
        on_error: OnError = "raise",
        name: str | None = None,
    ) -> None:
        expect_positive("workers", workers)
        if method not in ("process", "thread") or on_error not in ("raise", "skip"):
            raise InvalidArgument(
                f"method={method!r}, on_error={on_error!r}: give 'process' or 'thread', and 'raise' or 'skip'"
            )
        expect_positive("per_worker", per_worker)
        super().__init__(source, depth=per_worker * workers)
        self.name = name or f"map {next(_count)}"
        self.method = method
        self._function = function
        self._workers = workers
        self.per_worker = per_worker
        self._seed = seed
        self._results = _Results(skips=on_error == "skip")
        self._workshop: Workshop | None = None
        self._pool: Pool | None = None

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._workers

    @workers.setter
    def workers(self, workers: int) -> None:
        expect_positive("workers", workers)
        self._workers = workers
        self.depth = self.per_worker * workers
        if self._pool is not None:
            self._pool.resize(workers)

    @property
    def skipped(self) -> int:
        """Items left out because their function has raised."""
        return self._results.skipped

    def share(self, workshop: Workshop) -> None:
        """Makes the node's processes some of a workshop's. Called before the first item is asked for."""
        self._workshop = workshop

    def worker_figures(self) -> WorkerFigures | None:
        """None before the first item was asked for."""
        return None if self._pool is None else self._pool.figures()

    def next(self) -> Any:
        while isinstance(item := super().next(), Skipped):
            pass
        return item

    def close(self) -> None:
        """Ends the node's workers. The next reset begins with new ones."""
        super().close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _end(self, timeout: float | None) -> None:
        if self._pool is not None:
            self._pool.drop()
        super()._end(timeout)

    def _submit(self) -> Callable[[Flow, int, Any], None]:
        if self._pool is None:
            self._pool = Pool(
                self.name, self._maker(), self._results.tell, self._results.is_next, workers=self._workers
            )
            weakref.finalize(self, _leave, self._pool)
        pool, seed, results = self._pool, self._seed, self._results
        level = _maps(self.source)  # stages of one pipeline draw numbers of their own

        def submit(flow: Flow, number: int, item: Any) -> None:
            results.begin(flow)
            place = Place(seed, flow.start.epoch, f"{level}/{number}" if level else number)
            pool.put(Task(flow.start.flow, number, place, item))

        return submit

    def _maker(self) -> Callable[[], Any]:
        function, name = self._function, self.name
        if self.method == "thread":
            return lambda: ThreadWorker(name, function)
        if self._workshop is None:
            self._workshop = Workshop(_MEMORY)
        workshop = self._workshop
        stage = workshop.load(name, function)
        return lambda: ProcessWorker(workshop, name, stage)


def _maps(node: BaseNode[Any]) -> int:
    """Maps at or below a node."""
    return isinstance(node, Map) + sum(map(_maps, below(node)))


def _leave(pool: Pool) -> None:
    pool.drop()
    pool.resize(0)
