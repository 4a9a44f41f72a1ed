"""A recommender with a tuned loader, beside the best of a grid: python recommender_grid.py [--rounds 9] [--waits 0.003]

Trains the model of examples/recommender.py on its Parquet files, inside offload under a fifth of the tables' bytes. The
steps take their batches from these loaders by turns, an epoch each:

    tuned          hydra_ext.data.tuned around two stages, reading and preparing
    best           the fastest of a grid: the same two stages with fixed workers, or torch's DataLoader with numbers of
                   workers and of batches ahead
    twin           the same once more: what identical runs differ by
    default        DataLoader as it is without arguments
    cpu_count      DataLoader with a worker for each core

Training computes on the cores that the workers need, with one thread, and takes longer than its data. With --waits each
step takes so many seconds and no core, as for a GPU, and data bind. The grid has turns of its own before, so what was
fastest there is measured anew. Goal: steps come at least 0.98 times as fast as with the best of the grid.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from measure import Series, by_turns, verdict
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import pyarrow
import recommender as example

import hydra_ext
from hydra_ext import data

GOAL = 0.98
CORES = os.cpu_count() or 1
WORKERS = sorted({1, CORES, 2 * CORES, 4 * CORES})
GRID_ROUNDS = 3
SETTLING = 30.0  # seconds that the tuner has before anything is measured
MEMORY = "1GiB"
BATCHES = 32  # of each file

Place = tuple[str, int]
Loaders = dict[str, Iterable[Any]]


class RowGroups(Dataset[Any]):
    """Batches for a DataLoader: a row group each."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return example.prepared(example.read(self._places[index]))


def stages(places: list[Place], read: int = 1, prepare: int = 1) -> data.Map:
    node = data.Map(IterableWrapper(places), example.read, name="read", workers=read)
    return data.Map(node, example.prepared, name="prepare", workers=prepare)


def torch_loader(places: list[Place], workers: int, ahead: int) -> DataLoader[Any]:
    return DataLoader(
        RowGroups(places), batch_size=None, num_workers=workers, prefetch_factor=ahead, persistent_workers=True
    )


def grid(places: list[Place]) -> dict[str, Callable[[], Iterable[Any]]]:
    """What makes the loader of each point."""
    points: dict[str, Callable[[], Iterable[Any]]] = {}
    for workers, ahead in itertools.product(WORKERS, (2, 4, 8)):
        points[f"DataLoader, {workers} workers, prefetch_factor {ahead}"] = lambda w=workers, a=ahead: torch_loader(
            places, w, a
        )
    for read, prepare in itertools.product((1, CORES, 2 * CORES), (1, CORES)):
        points[f"stages, {read} and {prepare} workers"] = lambda r=read, p=prepare: data.Loader(
            stages(places, r, p), memory=MEMORY
        )
    return points


class Training:
    """The model and its optimizers in a run; :meth:`epoch` trains on a loader's batches, or waits."""

    def __init__(self, steps: int, waits: float) -> None:
        torch.manual_seed(0)
        self._steps = steps
        self._waits = waits
        self.model = model = example.Recommender()
        self.network = hydra_ext.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=0.002)
        self.tables = torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.01)
        self.nbytes = sum(table.weight.nbytes for table in model.tables)

    def epoch(self, loader: Iterable[Any]) -> Callable[[], None]:
        def run() -> None:
            count = 0
            for batch in loader:
                self._step(*batch)
                count += 1
            if count != self._steps:
                raise ValueError(f"an epoch had {count} batches, not {self._steps}")

        return run

    def _step(self, numbers: Tensor, ids: Tensor, label: Tensor) -> None:
        if self._waits > 0:
            time.sleep(self._waits)
            return
        nn.functional.binary_cross_entropy_with_logits(self.model(numbers, ids), label).backward()
        for optimizer in (self.tables, self.network):
            optimizer.step()
            optimizer.zero_grad()


def close(loader: Iterable[Any]) -> None:
    if isinstance(loader, data.Loader):
        loader.close()


def best_of_grid(training: Training, points: dict[str, Callable[[], Iterable[Any]]]) -> str:
    loaders: Loaders = {name: make() for name, make in points.items()}
    series = by_turns({name: training.epoch(each) for name, each in loaders.items()}, rounds=GRID_ROUNDS, warm_up=1)
    for name, each in loaders.items():
        print(f"    {name}: {series.median(name):.3f} s")
        close(each)
    return min(loaders, key=series.median)


def measured(training: Training, places: list[Place], rounds: int) -> tuple[str, Series, data.Loader]:
    """The best of the grid, and all by turns."""
    points = grid(places)
    best = best_of_grid(training, points)
    tuned = data.tuned(stages(places), memory=MEMORY)
    run = training.epoch(tuned)
    begun = time.perf_counter()
    while time.perf_counter() < begun + SETTLING:
        run()
    loaders: Loaders = {
        "tuned": tuned,
        "best": points[best](),
        "default": DataLoader(RowGroups(places), batch_size=None),
        "cpu_count": DataLoader(RowGroups(places), batch_size=None, num_workers=CORES, persistent_workers=True),
        "twin": points[best](),
    }
    series = by_turns({name: training.epoch(each) for name, each in loaders.items()}, rounds=rounds)
    for name in ("best", "twin"):
        close(loaders[name])
    return best, series, tuned


def compare(folder: Path, *, files: int, rounds: int, waits: float) -> bool:
    example.write_files(folder, files=files, batches=BATCHES)
    places = [(str(path), group) for path in sorted(folder.glob("*.parquet")) for group in range(BATCHES)]
    training = Training(len(places), waits)
    budget = training.nbytes // 5
    with hydra_ext.offload(training.model, training.network, budget=budget, device="simulated") as run:
        best, series, tuned = measured(training, places, rounds)
        tables, peak = run.report().tables, run.report().peak_bytes
    if not waits and (tables is None or not tables.rows_moved_bytes or peak > budget):
        raise SystemExit("the tables did not move by rows, or the budget was passed")
    with tuned:
        print(tuned.report())
    spread = series.spread("best", "twin")
    for name, seconds in series.seconds.items():
        print(
            f"  {name}: {len(places) / series.median(name):.1f} steps/s ({len(places) / max(seconds):.1f} to "
            f"{len(places) / min(seconds):.1f}); tuned is {series.speed('tuned', name):.3f} times as fast"
        )
    ratio = series.speed("tuned", "best")
    found = verdict(spread, margin=max(abs(ratio - GOAL), 0.02), holds=ratio >= GOAL)
    print(f"  beside {best}: {ratio:.3f} times as fast, goal {GOAL}, identical runs differ by {spread:.1%}: {found}")
    return ratio >= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--waits", type=float, default=0.0, help="seconds of a step that takes no core")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, pyarrow {pyarrow.__version__}, {CORES} cores, {asked.rounds} rounds")
    print(f"load {Path('/proc/loadavg').read_text().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        held = compare(Path(folder), files=asked.files, rounds=asked.rounds, waits=asked.waits)
    print(f"load {Path('/proc/loadavg').read_text().strip()}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
