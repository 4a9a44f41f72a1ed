"""What hydra_ext costs the host, per visit of a block: python benchmarks/host_cost.py [--against PYTHON] [--rounds 9]

Blocks of 256 numbers compute next to nothing, so that what a step takes beyond the plain one is hydra_ext's own work.
A training step visits each of 64 blocks twice. An evaluation visits each once.

    cell         budget                         optimizer
    fits         all blocks                     torch.optim.SGD
    evaluation   all blocks, after an update    none
    homes        all blocks and their state     hydra_ext.optim.AdamW
    evicting     a quarter of the blocks        torch.optim.SGD
    operations   all blocks                     torch.optim.SGD; each visit makes 17 operations instead of one

Each figure is of a process of its own; builds take turns. ``--against`` is the Python of another build.
The goals hold for a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import hydra_ext

BLOCKS = 64
NUMBERS = 256
MORE_OPERATIONS = 16
GOALS = {"fits": 15.0, "evaluation": 15.0, "homes": 30.0, "evicting": 60.0, "operations": None}
_STEPS = 30
_WARM_UP = 8
_BLOCK_BYTES = 4 * NUMBERS  # also of the activation that it saves
_AMPLE = 64 * 2**20


class Still(nn.Module):
    """A block that multiplies its input by its parameter."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((NUMBERS,), 1.0))
        self._times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._times):
            x = x * self.weight
        return x


class Training:
    """A model of still blocks with its optimizer."""

    def __init__(self, *, native: bool, times: int = 1) -> None:
        self.model = nn.Sequential(*[Still(times) for _ in range(BLOCKS)])
        parameters = self.model.parameters()
        self.optimizer = hydra_ext.optim.AdamW(parameters, lr=1e-6) if native else torch.optim.SGD(parameters, lr=1e-6)
        self.batch = torch.ones(NUMBERS)

    def step(self) -> None:
        self.model(self.batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.batch).sum().item()


def microseconds(run: Callable[[], None]) -> float:
    """Of one call: the shortest of five groups, as what else the machine does only makes a group longer."""
    groups = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(_STEPS // 5):
            run()
        groups.append((time.perf_counter() - begin) / (_STEPS // 5))
    return min(groups) * 1e6


def measure(cell: str) -> float:
    """Microseconds beyond the plain step, per visit, in this process."""
    torch.set_num_threads(1)
    times = 1 + MORE_OPERATIONS * (cell == "operations")
    plain, ours = [Training(native=cell == "homes", times=times) for _ in range(2)]
    budget = int(1.25 * BLOCKS * _BLOCK_BYTES) if cell == "evicting" else _AMPLE
    device = hydra_ext.SimulatedDevice(poison=False)
    with hydra_ext.offload(ours.model, ours.optimizer, budget=budget, device=device) as run:
        for _ in range(_WARM_UP):
            plain.step()
            ours.step()
        check(cell, run, ours)
        if cell == "evaluation":
            return (microseconds(ours.evaluate) - microseconds(plain.evaluate)) / BLOCKS
        return (microseconds(ours.step) - microseconds(plain.step)) / (2 * BLOCKS)


def check(cell: str, run: hydra_ext.Run, training: Training) -> None:
    """Raises unless a step moves what this cell is about."""
    before = run.report()
    training.step()
    after = run.report()
    loads, evictions = after.loads - before.loads, after.evictions - before.evictions
    expected = {"homes": loads == 0, "evicting": loads > BLOCKS and evictions > BLOCKS // 2}
    if not expected.get(cell, loads == BLOCKS and evictions == 0):
        raise RuntimeError(f"{cell}: {loads} loads and {evictions} evictions a step are not of this cell")


def measure_with(python: str, cell: str) -> float:
    """The figure of a process of its own."""
    command = [python, "-W", "ignore", __file__, "--measure", cell]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def show(cell: str, figures: dict[str, list[float]]) -> None:
    """Prints medians, and half the interquartile range of the difference of the two identical builds of a round."""
    this, other = figures["this"], figures["twin"]
    low, _, high = statistics.quantiles((a - b for a, b in zip(this, other, strict=True)), n=4)
    spread, median, goal = (high - low) / 2, statistics.median(this), GOALS[cell]
    print(f"{cell:12} {median:6.1f} us, identical processes differ by {spread:.1f} us", end="")
    if "against" in figures:
        before = statistics.median(figures["against"])
        print(f"; the other build {before:6.1f} us", end="")
    print("" if goal is None else f"; goal {goal:.0f} us: {'holds' if median <= goal else 'MISSED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="the Python of another build")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cells", nargs="*", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--measure", help="one cell in this process", choices=list(GOALS))
    options = parser.parse_args()
    if options.measure:
        print(measure(options.measure))
        return
    builds = {"this": sys.executable, "twin": sys.executable}
    if options.against:
        builds["against"] = options.against
    for cell in options.cells:
        rounds = [{name: measure_with(python, cell) for name, python in builds.items()} for _ in range(options.rounds)]
        show(cell, {name: [figures[name] for figures in rounds] for name in builds})


if __name__ == "__main__":
    main()
