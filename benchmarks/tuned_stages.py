"""Real pipelines of five stages with known costs, tuned: cd benchmarks && python tuned_stages.py [--pipelines 9]

Stages wait, or compute and wait; each worker has some memory; the consumer waits behind each item, as for a GPU. A third
of the pipelines has memory for half of the workers that its best rate needs. In the middle one stage takes four times,
or a quarter of, its time. Told are the rate over the last eight intervals of each half beside the best one that the
costs allow (hydra_ext.data.tuning.simulator), and the most memory that another process measured. Goals: 0.95 of the
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchdata.nodes import IterableWrapper

from hydra_ext import data
from hydra_ext.data.tuning.simulator import Machine, Problem, StageCost

GOAL = 0.95
_LAST = 8  # intervals
_OUTSIDE = """
import sys, time
from pathlib import Path
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
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
while Path(f"/proc/{me}").exists():
    processes = [each for each in below(me) if b"hydra_ext" in Path(f"/proc/{each}/cmdline").read_bytes()]
    seen = max(seen, sum(map(taken, processes)))
    out.write_text(str(seen))
    time.sleep(0.1)
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


def rate_of(loader: data.Loader) -> tuple[float, tuple[int, ...]]:
    report = loader.report().tuning
    intervals = report.intervals[-_LAST:] if report else ()
    return statistics.mean(each.view.rate for each in intervals), tuple(intervals[-1].workers)


def consume(iterator: Any, step: float, is_over: Callable[[], bool]) -> None:
    while not is_over():
        next(iterator)
        time.sleep(step)


def pipeline(seed: int, folder: Path, seconds: float) -> bool:
    stages, step = costs(seed)
    changed = random.Random(seed + 1).randrange(5)
    factors = [folder / f"factor-{seed}-{index}" for index in range(5)]
    node: Any = IterableWrapper(itertools.count())
    for index, (stage, factor) in enumerate(zip(stages, factors, strict=True)):
        factor.write_text("1")
        work = Stage(stage.compute, stage.wait, stage.worker_bytes, factor)
        node = data.Map(node, work, name=f"stage {index}")
    # Beside what it holds, a worker has about 10 MiB; five of them and their server have the rest.
    own = [StageCost(each.compute, each.wait, each.worker_bytes + 10 * 2**20) for each in stages]
    least = best(own, step, 2**50).memory([1] * 5)
    full = best(own, step, 2**50).memory(best(own, step, 2**50).best())
    limit = 250 * 2**20 + least + ((full - least) // 2 if seed % 3 == 0 else 2**32)
    outside = folder / f"outside-{seed}"
    held = True
    with data.tuned(node, memory=limit) as loader:
        watcher = subprocess.Popen([sys.executable, "-c", _OUTSIDE, str(os.getpid()), str(outside)])
        try:
            iterator = iter(loader)
            for factor in (1.0, random.Random(seed + 2).choice([0.25, 4.0])):
                factors[changed].write_text(str(factor))
                cost = own[changed]
                own[changed] = StageCost(factor * cost.compute, factor * cost.wait, cost.worker_bytes)
                end = time.perf_counter() + seconds
                consume(iterator, step, lambda end=end: time.perf_counter() > end)  # type: ignore[misc]
                rate, workers = rate_of(loader)
                report = loader.report().tuning
                assert report is not None
                views = [each.view for each in report.intervals]
                room = limit - views[-1].memory
                sizes = [stage.worker_bytes for stage in views[-1].stages]
                measured = [StageCost(each.compute, each.wait, size) for each, size in zip(own, sizes, strict=True)]
                memory = best(measured, step, 2**50).memory(workers) + room
                problem = best(measured, step, memory)
                share = rate / problem.rate(problem.best())
                held &= share >= GOAL
                print(
                    f"pipeline {seed}, factor {factor:g}: {rate:.1f} items a second with {workers}, "
                    f"{share:.3f} of the best ({problem.best()}); {len(views)} intervals",
                    flush=True,
                )
        finally:
            watcher.kill()
            watcher.wait()
    seen = int(outside.read_text())
    held &= seen <= limit
    print(f"pipeline {seed}: at most {seen / 2**20:.0f} of {limit / 2**20:.0f} MiB from outside", flush=True)
    return held


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
