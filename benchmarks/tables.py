"""Embedding tables of ten times the budget: python benchmarks/tables.py [--rounds 9] [--rows 40000]

A DLRM-like model: eight tables whose indices follow a power law, a network below the numbers, products of all pairs, a
network above. Each sample is 64 steps, after which a native optimizer's table has caught up once.

    case      layers                            optimizer
    sparse    sparse=True                       torch.optim.SGD
    adam      sparse=False                      hydra_ext.optim.Adam
    adamw     sparse=False                      hydra_ext.optim.AdamW, whose decay changes all rows in each step

    plain     no context, everything on the host
    rows      a tenth of the tables' bytes as budget
    whole     blocks= names the tables, and the budget holds two of them beside the rest

With --disk the host may hold a tenth of the tables and their moments, and the rest is in a temporary folder:

    disk, disk whole    as rows and whole

With --cold the system's cache holds nothing of the tables when a step begins. Between steps 30 ms pass in which nothing
computes here, as while a GPU works. Told are the seconds of a step with and without hydra_ext.read_ahead before them.

The device is simulated, and its link has no limit: bytes cost what a copy in the host's memory costs. On a link they
cost more, which favours rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Run

TABLES, WIDTH, NUMBERS = 8, 32, 13
BATCH, STEPS = 128, 64
CASES = ("sparse", "adam", "adamw")


class Recommender(nn.Module):
    """Bags of indices and numbers, as in DLRM (Naumov et al., 2019)."""

    def __init__(self, rows: int, *, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        bags = [table(at, offsets) for table, at in zip(self.tables, indices, strict=True)]
        found = torch.stack([dense, *bags], dim=1)
        products = found @ found.transpose(1, 2)
        one, other = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        return self.top(torch.cat([dense, products[:, one, other]], dim=1)).squeeze(1)


class Training:
    """One model with its optimizer and its batches, which are those of any other training of the case."""

    def __init__(self, case: str, rows: int) -> None:
        torch.manual_seed(0)
        self.model = Recommender(rows, sparse=case == "sparse")
        kinds: dict[str, Any] = {
            "sparse": torch.optim.SGD,
            "adam": hydra_ext.optim.Adam,
            "adamw": hydra_ext.optim.AdamW,
        }
        self.optimizer = kinds[case](self.model.parameters(), lr=0.01)
        self.rows_touched = 0  # rows that its batches look up, each once a batch and table
        self._batches = self._made(rows)
        self.following = next(self._batches)  # the next step's

    def _made(self, rows: int) -> Iterator[tuple[Tensor, ...]]:
        made = torch.Generator().manual_seed(1)
        while True:
            lengths = torch.randint(1, 5, (BATCH,), generator=made)
            ends = lengths.cumsum(0)
            drawn = torch.rand(TABLES, int(ends[-1]), generator=made)
            indices = (rows * drawn**3).long().clamp_(max=rows - 1)  # a few rows are met often
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
            yield torch.randn(BATCH, NUMBERS, generator=made), indices, offsets, torch.rand(BATCH, generator=made)

    def step(self) -> None:
        numbers, indices, offsets, target = self.following
        self.following = next(self._batches)
        self.rows_touched += sum(len(at.unique()) for at in indices)
        nn.functional.binary_cross_entropy_with_logits(self.model(numbers, indices, offsets), target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sample(self) -> float:
        """Seconds of a step, the mean of a sample."""
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return (time.perf_counter() - begin) / STEPS

    def bits(self) -> list[Tensor]:
        return [parameter.detach().clone().view(torch.int32) for parameter in self.model.parameters()]


def entered(training: Training, way: str, stack: ExitStack, folder: str | None = None) -> Run:
    size = training.model.tables[0].weight.nbytes
    whole = [f"tables.{number}" for number in range(TABLES)]
    options: dict[str, Any] = {"budget": TABLES * size // 10}
    if way.endswith("whole"):
        options = {"budget": 3 * size, "blocks": whole}
    if way.startswith("disk"):
        # The working memory for tables that move whole takes 18 of them.
        held = 19 * size if way.endswith("whole") else 3 * TABLES * size // 10
        options |= {"host_budget": held, "spill_dir": folder or stack.enter_context(tempfile.TemporaryDirectory())}
    return stack.enter_context(
        hydra_ext.offload(training.model, training.optimizer, device="simulated", activations=None, **options)
    )


def dropped(folder: str) -> None:
    """Has the system forget what it has in its cache of the files there, whose names are gone."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(folder):
                os.fdatasync(int(link.name))
                os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
        except FileNotFoundError:  # that of the folder of links
            continue


def cold(rows: int, rounds: int) -> str:
    """Seconds of a step with an empty cache, with and without reading ahead."""
    trainings = {way: Training("adam", rows) for way in ("not ahead", "ahead", "ahead again")}
    seconds: dict[str, list[float]] = {way: [] for way in trainings}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd()))  # no memory's file system
        runs = [entered(each, "disk", stack, folder) for each in trainings.values()]
        for training in trainings.values():
            training.step()
        for _ in range(rounds):
            for way, training in trainings.items():
                dropped(folder)
                if way != "not ahead":
                    _, indices, _, _ = training.following
                    hydra_ext.read_ahead(dict(zip(training.model.tables, indices, strict=True)))
                time.sleep(0.03)
                begin = time.perf_counter()
                training.step()
                seconds[way].append(time.perf_counter() - begin)
        if any(table.disk is None for run in runs for table in run.tables):
            raise SystemExit("a table was not on the disk")
    middle = {way: 1e3 * statistics.median(values) for way, values in seconds.items()}
    spread = abs(middle["ahead"] / middle["ahead again"] - 1)
    return (
        f"adam, cold: {middle['not ahead']:.1f} ms a step, read ahead {middle['ahead']:.1f} and "
        f"{middle['ahead again']:.1f} (identical runs {spread:.1%}), {rounds} steps each"
    )


def measure(case: str, rows: int, rounds: int, *, disk: bool) -> str:
    names = ["plain", "rows", "whole", "rows again", *(["disk", "disk whole"] if disk and case != "sparse" else [])]
    ways = {way: Training(case, rows) for way in names}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        runs = {way: entered(each, way.removesuffix(" again"), stack) for way, each in ways.items() if way != "plain"}
        for _ in range(rounds):
            for way, training in ways.items():
                seconds[way].append(training.sample())
        ours, whole = runs["rows"].report(), runs["whole"].report()
        steps = rounds * STEPS
    tables = ours.tables
    if tables is None or ours.peak_bytes > ours.budget_bytes:
        raise SystemExit("the tables did not move by rows, or the budget was passed")
    counted = tables.rows_moved_bytes == ways["rows"].rows_touched * WIDTH * 4
    plain = ways["plain"].bits()
    equal = all(a.equal(b) for each in ways.values() for a, b in zip(each.bits(), plain, strict=True))
    ratios = [b / a for a, b in zip(seconds["rows"], seconds["rows again"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    middle = {way: 1e3 * statistics.median(values) for way, values in seconds.items()}
    moved = tables.rows_moved_bytes + tables.gradients_moved_bytes
    moved_whole = whole.weights_moved_bytes + whole.gradients_moved_bytes
    of_disk = runs["disk"].report().tables if "disk" in runs else None
    there = ""
    if of_disk is not None:
        moved_there = (of_disk.disk.read_bytes + of_disk.disk.written_bytes) / steps / 1024
        there = f"  disk {middle['disk']:.2f} ms, {moved_there:,.0f} KiB; disk whole {middle['disk whole']:.2f} ms"
    found = f"bits {'equal' if equal else 'DIFFER'}, rows {'as' if counted else 'NOT AS'} counted"
    return (
        f"{case:7} {found}  ms a step: plain {middle['plain']:.2f}, rows "
        f"{middle['rows']:.2f}, whole {middle['whole']:.2f} (identical runs {(high - low) / 2:.1%})  KiB a step: rows "
        f"{moved / steps / 1024:,.0f}, whole {moved_whole / steps / 1024:,.0f}  budget "
        f"{ours.budget_bytes / 2**20:.1f} MiB of {tables.nbytes / 2**20:.1f}, whole {whole.budget_bytes / 2**20:.1f}"
        f"{there}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="samples of each training, by turns")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of each table")
    parser.add_argument("--disk", action="store_true", help="also with tables that the host has no room for")
    parser.add_argument("--cold", action="store_true", help="reads of a disk, ahead or not")
    parser.add_argument("--case", choices=CASES, action="append", help="by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cold:
        print(cold(options.rows, 20 * options.rounds))
        return
    print(f"torch {torch.__version__}, {options.rounds} samples of {STEPS} steps, {options.rows} rows, 1 thread")
    for case in options.case or CASES:
        print(measure(case, options.rows, options.rounds, disk=options.disk), flush=True)


if __name__ == "__main__":
    main()
