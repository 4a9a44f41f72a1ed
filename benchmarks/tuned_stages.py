"""Real pipelines of five stages with known costs, tuned: cd benchmarks && python tuned_stages.py [--pipelines 9]

Stages wait, or compute and wait; each worker has some memory; the consumer waits behind each item, as for a GPU. A
third of the pipelines has memory for half of the workers that its best rate needs. In the middle one stage takes four
times, or a quarter of, its time. Told are the rate over the last eight intervals of each half beside the best one that
the costs allow (hydra_ext.data.tuning.simulator), and the most memory that another process measured. Goals: 0.95 of the
best rate, and never more memory than the limit.

benchmarks/tuners.py has 200 simulated ones, where cores and limits change, too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torchdata.nodes import IterableWrapper

from hydra_ext import data
from hydra_ext.data.tuning.simulator import Machine, Problem, StageCost

GOAL = 0.95
_LAST = 8  # intervals
_OUTSIDE = """
import os, sys, time
from pathlib import Path
os.nice(19)  # it reads for a long time: what it measures should not wait for it
me, out, seen = int(sys.argv[1]), Path(sys.argv[2]), 0
def below(process):
    found = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return found + [each for child in found for each in below(child)]
def taken(process):
    try:
        if b"hydra_ext" not in Path(f"/proc/{process}/cmdline").read_bytes():
            return 0
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
while Path(f"/proc/{me}").exists():
    seen = max(seen, sum(map(taken, set(below(me)) - {os.getpid()})))
    out.write_text(str(seen))
    time.sleep(0.25)
"""


class Stage:
    """Takes a known time for an item, by a factor that a file holds."""

    def __init__(self, compute: float, wait: float, nbytes: int, factor: Path) -> None:
        self._compute = compute
        self._wait = wait
        self._nbytes = nbytes
        self._factor = factor
        self._held = b""

    def __call__(self, item: int) -> int:
        if not self._held:
            self._held = b"x" * self._nbytes
        factor = float(self._factor.read_text())
        end = time.thread_time() + factor * self._compute
        while time.thread_time() < end:
            pass
        time.sleep(factor * self._wait)
        return item


def put(path: Path, factor: float) -> None:
    """Writes it in one piece: workers read it at any time."""
    new = path.with_suffix(".new")
    new.write_text(str(factor))
    new.replace(path)


def costs(seed: int) -> tuple[list[StageCost], float]:
    """Of stages that need few of the cores, and the consumer's seconds for an item."""
    draw = random.Random(seed)
    stages = []
    for _ in range(5):
        seconds = 10 ** draw.uniform(-2.3, -1.1)
        compute = draw.choice([0.0, 0.0, min(0.25 * seconds, 0.002)])
        stages.append(StageCost(compute, seconds - compute, draw.randint(4, 24) * 2**20))
    return stages, draw.choice([0.004, 0.01, 0.02])


def best(stages: list[StageCost], step: float, memory: int) -> Problem:
    return Problem(tuple(stages), Machine(os.cpu_count() or 1, memory, step))


def tuned(stages: list[StageCost], factors: list[Path], *, limit: int) -> data.Loader:
    node: Any = IterableWrapper(itertools.count())
    for index, (stage, factor) in enumerate(zip(stages, factors, strict=True)):
        put(factor, 1.0)
        work = Stage(stage.compute, stage.wait, stage.worker_bytes, factor)
        node = data.Map(node, work, name=f"stage {index}")
    return data.tuned(node, memory=limit)


def consume(iterator: Any, step: float, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        next(iterator)
        time.sleep(step)


def share_of(loader: data.Loader, costs: list[StageCost], step: float, limit: int) -> tuple[float, str]:
    """Of the best rate with the memory that workers were seen to have, and in words."""
    intervals = [] if loader.report().tuning is None else loader.report().tuning.intervals  # type: ignore[union-attr]
    rate = statistics.mean(each.view.rate for each in intervals[-_LAST:])
    view, workers = intervals[-1].view, intervals[-1].workers
    measured = [
        StageCost(cost.compute, cost.wait, stage.worker_bytes) for cost, stage in zip(costs, view.stages, strict=True)
    ]
    beside = view.memory - best(measured, step, 0).memory([stage.workers for stage in view.stages])
    problem = best(measured, step, limit - beside)
    share = rate / problem.rate(problem.best())
    words = f"{rate:.1f} items a second with {tuple(workers)}, {share:.3f} of the best rate, of {problem.best()}"
    return share, f"{words}; {len(intervals)} intervals"


def pipeline(seed: int, folder: Path, seconds: float) -> bool:
    stages, step = costs(seed)
    draw = random.Random(seed + 1)
    changed, times = draw.randrange(5), draw.choice([0.25, 4.0])
    factors = [folder / f"factor-{seed}-{index}" for index in range(5)]
    # Beside what it holds, a worker has about 10 MiB; five of them and their server have the rest.
    own = [StageCost(each.compute, each.wait, each.worker_bytes + 10 * 2**20) for each in stages]
    free = best(own, step, 2**50)
    full, least = free.memory(free.best()), free.memory([1] * 5)
    limit = 250 * 2**20 + least + ((full - least) // 2 if seed % 3 == 0 else 2**32)
    outside, shares = folder / f"outside-{seed}", []
    with tuned(stages, factors, limit=limit) as loader:
        watcher = subprocess.Popen([sys.executable, "-c", _OUTSIDE, str(os.getpid()), str(outside)])
        try:
            iterator = iter(loader)
            for factor in (1.0, times):
                put(factors[changed], factor)
                cost = own[changed]
                own[changed] = StageCost(factor * cost.compute, factor * cost.wait, cost.worker_bytes)
                consume(iterator, step, seconds)
                share, words = share_of(loader, own, step, limit)
                shares.append(share)
                print(f"pipeline {seed}, stage {changed} x {factor:g}: {words}", flush=True)
        finally:
            watcher.kill()
            watcher.wait()
    seen = int(outside.read_text())
    print(f"pipeline {seed}: at most {seen / 2**20:.0f} of {limit / 2**20:.0f} MiB from outside", flush=True)
    return min(shares) >= GOAL and seen <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=9)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each half")
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(asked.first, asked.first + asked.pipelines)
        held = [pipeline(seed, Path(folder), asked.seconds) for seed in seeds]
    print(f"{sum(held)} of {len(held)} hold both goals")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
