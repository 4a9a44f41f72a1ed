"""A tuned loader beside what one can choose by hand: cd benchmarks && python feed_grid.py [--rounds 9]

Epochs of the pipelines of feed.py, all by turns in one process:

    tuned          hydra_ext.data.from_dataset: the number of workers follows from the training
    best           DataLoader with the number of workers and the prefetch_factor that a grid found to be fastest
    twin           the same once more: what identical runs differ by
    default        DataLoader as it is without arguments
    cpu_count      DataLoader with a worker for each core
    nodes thread, nodes process    ParallelMapper of torchdata.nodes with a worker for each core
    SPDL thread, SPDL process      SPDL with as many, if it is installed

DataLoader has persistent workers, SPDL a pool that stays. ParallelMapper begins new workers with each epoch, and those
of its processes may print that they can only test a child process. The grid has turns of its own before, so what was
fastest there is measured anew. The consumer waits behind each batch, as for a GPU: it takes no core. With --computes it
multiplies matrices on the same cores. Goals: at least 0.98 times as fast as the best of the grid and 1.5 times as fast
as the default; where it computes, at least as fast as the best of the grid.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from feed import PIPELINES
from measure import by_turns, timed, verdict
from torch.utils.data import DataLoader, Dataset, default_collate
from torchdata.nodes import Batcher, IterableWrapper, ParallelMapper
from torchdata.nodes import Loader as Nodes

from hydra_ext import data

GOAL, COMPUTING_GOAL, DEFAULT_GOAL = 0.98, 1.0, 1.5
CORES = os.cpu_count() or 1
GRID = [(workers, prefetch) for workers in sorted({1, CORES, 2 * CORES, 4 * CORES}) for prefetch in (2, 4, 8)]
GRID_ROUNDS = 3
SETTLING = 20.0  # seconds that the tuner has before anything is measured


class Fetch:
    """A batch of a dataset by its keys."""

    def __init__(self, dataset: Dataset[torch.Tensor]) -> None:
        self._dataset = dataset

    def __call__(self, keys: list[int]) -> torch.Tensor:
        batch: torch.Tensor = default_collate([self._dataset[key] for key in keys])
        return batch


_fetch: Fetch | None = None  # of a process of the pool


def _begin(dataset: Dataset[torch.Tensor]) -> None:
    global _fetch
    torch.set_num_threads(1)
    _fetch = Fetch(dataset)


def in_pool(keys: list[int]) -> Any:
    """As an array: the pool pickles its bytes, which is faster than to share a file for each tensor."""
    if _fetch is None:
        raise RuntimeError("not a process of the pool")
    return _fetch(keys).numpy()


class Waits:
    """Takes seconds and no core."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> None:
        time.sleep(self._seconds)


class Computes:
    """Multiplies matrices, as often as takes so many seconds where nothing else runs."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.rand(256, 256)
        self._count = 1
        self()
        one = min(timed(self) for _ in range(50))
        self._count = max(1, round(seconds / one))

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)


def nodes(dataset: Any, batch: int, method: Any) -> Any:
    keys = Batcher(IterableWrapper(range(len(dataset))), batch, drop_last=False)
    return Nodes(ParallelMapper(keys, Fetch(dataset), num_workers=CORES, method=method))


class Spdl:
    """A pipeline of SPDL for each epoch, in the order of the keys."""

    def __init__(self, dataset: Any, batch: int, executor: Executor | None) -> None:
        count = len(dataset)
        self._keys = [list(range(first, min(first + batch, count))) for first in range(0, count, batch)]
        self._fetch = Fetch(dataset)
        self._executor = executor

    def __iter__(self) -> Iterator[torch.Tensor]:
        from spdl.pipeline import PipelineBuilder

        building = PipelineBuilder().add_source(self._keys)
        function = self._fetch if self._executor is None else in_pool
        building.pipe(function, concurrency=CORES, executor=self._executor, output_order="input").add_sink(2 * CORES)
        pipeline = building.build(num_threads=CORES, max_failures=0)
        with pipeline.auto_stop():
            for batch in pipeline:
                yield torch.as_tensor(batch)


def epoch(loader: Any, step: Callable[[], None], batches: int) -> Callable[[], None]:
    def run() -> None:
        count = 0
        for _ in loader:
            step()
            count += 1
        if count != batches:
            raise ValueError(f"an epoch had {count} batches, not {batches}")

    return run


def loader_of(dataset: Any, batch: int, workers: int, prefetch: int) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, batch, num_workers=workers, prefetch_factor=prefetch, persistent_workers=True)


def best_of_grid(dataset: Any, batch: int, step: Callable[[], None]) -> tuple[int, int]:
    """Workers and prefetch_factor."""
    loaders = {point: loader_of(dataset, batch, *point) for point in GRID}
    series = by_turns(
        {str(point): epoch(each, step, len(each)) for point, each in loaders.items()}, rounds=GRID_ROUNDS, warm_up=1
    )
    for point in GRID:
        print(f"    {point[0]} workers, prefetch_factor {point[1]}: {series.median(str(point)):.3f} s")
    return min(GRID, key=lambda point: series.median(str(point)))


def others(dataset: Any, batch: int, stack: contextlib.ExitStack) -> dict[str, Any]:
    found = {f"nodes {method}": nodes(dataset, batch, method) for method in ("thread", "process")}
    if find_spec("spdl") is None:
        print("SPDL is not installed: it is left out")
        return found
    context = multiprocessing.get_context("forkserver")
    pool = stack.enter_context(ProcessPoolExecutor(CORES, context, initializer=_begin, initargs=(dataset,)))
    return found | {"SPDL thread": Spdl(dataset, batch, None), "SPDL process": Spdl(dataset, batch, pool)}


def compare(name: str, *, computes: bool, rounds: int) -> bool:
    make, batch, seconds = PIPELINES[name]
    dataset, step = make(), (Computes if computes else Waits)(seconds)
    print(
        f"{name}, the consumer {'computes' if computes else 'waits'}; load {Path('/proc/loadavg').read_text().strip()}"
    )
    best = best_of_grid(dataset, batch, step)
    with contextlib.ExitStack() as stack:
        tuned = stack.enter_context(data.from_dataset(dataset, batch))
        run = epoch(tuned, step, len(tuned))
        begun = time.perf_counter()
        while time.perf_counter() < begun + SETTLING:
            run()
        loaders = {
            "tuned": tuned,
            "best": loader_of(dataset, batch, *best),
            "default": DataLoader(dataset, batch),
            "cpu_count": DataLoader(dataset, batch, num_workers=CORES, persistent_workers=True),
            "twin": loader_of(dataset, batch, *best),
        }
        loaders |= others(dataset, batch, stack)
        series = by_turns({each: epoch(loader, step, len(tuned)) for each, loader in loaders.items()}, rounds=rounds)
        workers = {stage: each.workers for stage, each in tuned.stages.items()}
    spread = series.spread("best", "twin")
    for each in loaders:
        low, high = min(series.seconds[each]), max(series.seconds[each])
        print(
            f"  {each}: {series.median(each):.3f} s ({low:.3f} to {high:.3f}); tuned is "
            f"{series.speed('tuned', each):.3f} times as fast"
        )
    goals = [(series.speed("tuned", "best"), COMPUTING_GOAL if computes else GOAL, f"the best of the grid {best}")]
    if not computes:
        goals.append((series.speed("tuned", "default"), DEFAULT_GOAL, "the default"))
    for ratio, goal, what in goals:
        found = verdict(spread, margin=max(abs(ratio - goal), 0.02), holds=ratio >= goal)
        print(
            f"  beside {what}: {ratio:.3f} times as fast, goal {goal}, identical runs differ by {spread:.1%}: {found}"
        )
    print(f"  tuned has {workers}; load {Path('/proc/loadavg').read_text().strip()}", flush=True)
    return all(ratio >= goal for ratio, goal, _ in goals)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--computes", action="store_true", help="the consumer computes on the same cores")
    parser.add_argument("--only", choices=PIPELINES)
    asked = parser.parse_args()
    versions = ", ".join(
        f"{each} {importlib.metadata.version(each)}" for each in ("torch", "torchdata", "spdl") if find_spec(each)
    )
    print(f"{versions}, Python {platform.python_version()}, {CORES} cores, {asked.rounds} rounds")
    names = [asked.only] if asked.only else list(PIPELINES)
    held = [compare(name, computes=asked.computes, rounds=asked.rounds) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
