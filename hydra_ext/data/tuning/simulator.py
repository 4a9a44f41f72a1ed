"""A pipeline of stages with known costs, in steady state, and the best that can be had of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_ext.data.tuning.views import StageView, View


@dataclass(frozen=True)
class StageCost:
    """What one item costs.

    Attributes:
        compute: Seconds of a core.
        wait: Seconds without a core.
        worker_bytes: Of a worker, with what it has on the way.
    """

    compute: float
    wait: float
    worker_bytes: int


@dataclass(frozen=True)
class Machine:
    """What a pipeline has.

    Attributes:
        cores: That its workers may use.
        memory: Bytes that they may take.
        step: Seconds that the consumer takes for an item.
    """

    cores: float
    memory: int
    step: float


@dataclass(frozen=True)
class Problem:
    """Stages and a machine: how many workers should each stage have?"""

    stages: tuple[StageCost, ...]
    machine: Machine

    def rate(self, workers: Sequence[int]) -> float:
        """Items a second. Cores are shared: where they do not suffice, they bind, however many workers there are."""
        return min(self.able(workers), 1 / self.machine.step)

    def able(self, workers: Sequence[int]) -> float:
        """Items a second that the stages make for a consumer that takes no time."""
        compute = sum(stage.compute for stage in self.stages)
        slowest = min(count / (stage.compute + stage.wait) for stage, count in zip(self.stages, workers, strict=True))
        return min(slowest, self.machine.cores / compute if compute else float("inf"))

    def memory(self, workers: Sequence[int]) -> int:
        """Bytes of so many workers."""
        return sum(stage.worker_bytes * count for stage, count in zip(self.stages, workers, strict=True))

    def best(self) -> tuple[int, ...]:
        """The fewest workers of the highest rate: water is filled where it is lowest, while memory lasts."""
        workers = [1] * len(self.stages)
        highest, found = self.rate([10**9] * len(self.stages)), tuple(workers)
        left = self.machine.memory - self.memory(workers)
        while self.rate(workers) < highest:
            lowest = min(range(len(workers)), key=lambda i: workers[i] / (self.stages[i].compute + self.stages[i].wait))
            left -= self.stages[lowest].worker_bytes
            if left < 0:
                break
            workers[lowest] += 1
            if self.rate(workers) > self.rate(found):
                found = tuple(workers)
        return found


def random_problem(seed: int, *, stages: int = 5) -> Problem:
    """Stages of 0.3 to 50 ms that compute, wait or do both, with cores, memory and a consumer that may bind or not."""
    draw = random.Random(seed)
    costs = []
    for _ in range(stages):
        seconds = 10 ** draw.uniform(-3.5, -1.3)
        kind = draw.random()
        compute = seconds if kind < 0.4 else 0.0 if kind < 0.7 else seconds * draw.random()
        costs.append(StageCost(compute, seconds - compute, int(2**20 * 10 ** draw.uniform(0.5, 2))))
    cores = draw.choice([2, 4, 8, 16])
    free = Problem(tuple(costs), Machine(cores, 10**15, 1e-4))
    least, full = free.memory([1] * stages), free.memory(free.best())
    memory = int(least + (full - least) * draw.choice([0.3, 0.6, 1.0, 1.5, 3]))
    step = 1 / (free.able(free.best()) * draw.choice([0.3, 0.7, 1.2, 3]))
    return Problem(tuple(costs), Machine(cores, memory, step))


def changed(problem: Problem, seed: int) -> Problem:
    """Another cost of one stage, another number of cores, or another limit: which of them, the seed tells."""
    draw = random.Random(seed)
    stages, machine = list(problem.stages), problem.machine
    kind = seed % 3
    if kind == 0:
        index, times = draw.randrange(len(stages)), draw.choice([0.25, 4])
        cost = stages[index]
        stages[index] = replace(cost, compute=times * cost.compute, wait=times * cost.wait)
    elif kind == 1:
        machine = replace(machine, cores=machine.cores * draw.choice([0.5, 2]))
    else:
        least = problem.memory([1] * len(stages))
        machine = replace(machine, memory=max(least, int(machine.memory * draw.choice([0.6, 2]))))
    return Problem(tuple(stages), machine)


class SimulatedPipeline:
    """
    Args:
        noise: Of what is measured, as a share: what differs by so much from interval to interval is each service
            time, how fast the stages are together, and how long the consumer takes.
    """

    def __init__(self, problem: Problem, *, noise: float, seed: int) -> None:
        self.problem = problem
        self.workers = (1,) * len(problem.stages)
        self._noise = noise
        self._random = random.Random(seed)

    def view(self) -> View:
        """One interval with these workers."""
        stages, machine = self.problem.stages, self.problem.machine
        slow = self._slowness(self.problem.rate(self.workers))
        step = machine.step * self._noisy()
        rate = min(self.problem.able(self.workers) * self._noisy(), 1 / step)
        return View(
            stages=[
                StageView(count, (stage.compute * slow + stage.wait) * self._noisy(), stage.worker_bytes)
                for stage, count in zip(stages, self.workers, strict=True)
            ],
            rate=rate,
            starved=max(0.0, 1 - rate * step),
            memory=self.problem.memory(self.workers),
            limit=machine.memory,
        )

    def _slowness(self, items: float) -> float:
        """How many times as long compute takes where cores are short, in the stage that binds."""
        used = items * sum(stage.compute for stage in self.problem.stages)
        if used < self.problem.machine.cores * 0.999:
            return 1.0
        slowest = max(
            (count / items - stage.wait) / stage.compute
            for stage, count in zip(self.problem.stages, self.workers, strict=True)
            if stage.compute
        )
        return max(1.0, slowest)

    def _noisy(self) -> float:
        return 1 + self._noise * (2 * self._random.random() - 1)
