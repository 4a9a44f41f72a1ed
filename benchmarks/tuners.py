"""The rule and the agent in the simulator: cd benchmarks && python tuners.py [--seeds 5] [--problems 200]

Random pipelines of five stages that sleep, compute or do both. 60 intervals; then a cost, the cores or the limit
changes; 60 more. Shares are of the rate that water-filling has, and are looked at 30 intervals behind each beginning.
Goal: at least 0.95 for every problem, before and behind the change, and memory never above the limit. The limit of the
interval in which it shrinks does not count. The agent's network is trained anew for each seed, with other problems:
once with InTune's reward, where the share of memory has weight 1, and once without it. Then the agent stays as it is,
or learns on, which is slow: a quarter of the problems.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hydra_ext.data.tuning.agent import Agent, Reward
from hydra_ext.data.tuning.network import Network
from hydra_ext.data.tuning.practice import trained
from hydra_ext.data.tuning.rule import Rule
from hydra_ext.data.tuning.simulator import Problem, SimulatedPipeline, changed, random_problem
from hydra_ext.data.tuning.views import View

GOAL = 0.95
AT = 30
INTERVALS = 60
NOISES = (0.0, 0.01, 0.03, 0.1)
WEIGHTS = (1.0, 0.0)  # of memory in the reward: InTune's, and none


class Decides(Protocol):
    def decide(self, view: View) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Result:
    """Of one tuner and one noise: a value for each problem.

    Attributes:
        at: Share of the optimum in the 30th interval, before and behind the change.
        means: Mean share from there on, before and behind it.
        above: Intervals above the limit.
        changes: Of workers, for each interval behind the 30th.
        memory: Mean of the bytes of the workers in the last intervals of both parts, beside the fewest that have the
            optimum.
    """

    at: tuple[list[float], list[float]]
    means: tuple[list[float], list[float]]
    above: int
    changes: float
    memory: float


def run(make: Callable[[], Decides], problems: range, noise: float) -> Result:
    at: tuple[list[float], list[float]] = ([], [])
    means: tuple[list[float], list[float]] = ([], [])
    memory: list[float] = []
    above = changes = 0
    for seed in problems:
        tuner, pipeline = make(), SimulatedPipeline(random_problem(seed), noise=noise, seed=seed)
        for part in range(2):
            if part:
                pipeline.problem = changed(pipeline.problem, seed)
            top, found = pipeline.problem.rate(pipeline.problem.best()), []
            for interval in range(INTERVALS):
                view = pipeline.view()
                above += view.memory > view.limit and bool(interval or not part)
                found.append(pipeline.problem.rate(pipeline.workers) / top)
                workers = tuner.decide(view)
                changes += workers != pipeline.workers and interval >= AT
                pipeline.workers = workers
            at[part].append(found[AT])
            means[part].append(statistics.fmean(found[AT:]))
            problem = pipeline.problem
            memory.append(problem.memory(pipeline.workers) / problem.memory(problem.best()))
    changes_each = changes / (2 * (INTERVALS - AT) * len(problems))
    return Result(at, means, above, changes_each, statistics.fmean(memory))


def reached(shares: Sequence[float]) -> float:
    return sum(share >= GOAL for share in shares) / len(shares)


def spread(values: Sequence[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}}" if low == high else f"{middle:{form}} ({low:{form}} to {high:{form}})"


def row(name: str, noise: float, results: Sequence[Result]) -> str:
    cells = [name, f"{noise:.0%}"]
    for part in range(2):
        cells += [
            spread([reached(result.at[part]) for result in results], ".1%"),
            spread([min(result.at[part]) for result in results], ".3f"),
            spread([statistics.fmean(result.means[part]) for result in results], ".3f"),
        ]
    cells += [str(sum(result.above for result in results)), spread([result.changes for result in results], ".3f")]
    cells.append(spread([result.memory for result in results], ".3f"))
    return f"| {' | '.join(cells)} |"


def dearest(problem: Problem) -> float:
    """Share of the optimum that is left where throughput x (1 - share of memory) is highest."""
    workers, found = [1] * len(problem.stages), (0.0, 0.0)
    while problem.memory(workers) <= problem.machine.memory:
        rate = problem.rate(workers)
        found = max(found, (rate * (1 - problem.memory(workers) / problem.machine.memory), rate))
        if rate == problem.rate(problem.best()):
            break
        costs = [stage.compute + stage.wait for stage in problem.stages]
        workers[min(range(len(workers)), key=lambda i: workers[i] / costs[i])] += 1
    return found[1] / problem.rate(problem.best())


def network(seed: int, weight: float, folder: Path) -> Network:
    """Trained, or read where it was before."""
    path = folder / f"{weight}-{seed}.json"
    if not path.exists():
        begun = time.process_time()
        trained(seed=seed, reward=Reward(weight)).write(path)
        print(f"{path.name}: trained in {time.process_time() - begun:.0f} s of a core", file=sys.stderr)
    return Network.read(path)


def agents(folder: Path, asked: argparse.Namespace) -> None:
    for learns, weight, noise in itertools.product((False, True) if asked.seeds else (), WEIGHTS, asked.noises):
        held = asked.problems // 4 if learns else asked.problems
        problems = range(asked.first, asked.first + held)
        results = [
            run(
                functools.partial(Agent, network(seed, weight, folder), learns=learns, reward=Reward(weight)),
                problems,
                noise,
            )
            for seed in range(asked.seeds)
        ]
        print(row(f"agent, weight {weight:g}{', learns on' if learns else ''}", noise, results), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="of the problems: the rule was developed on 0 to 199")
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES)
    parser.add_argument("--seeds", type=int, default=5, help="of networks; 0: the rule alone")
    parser.add_argument("--networks", type=Path, help="a folder that keeps what was trained")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    problems = range(asked.first, asked.first + asked.problems)
    left = [dearest(random_problem(seed)) for seed in problems]
    print(f"Where InTune's reward is highest, {reached(left):.1%} of the problems have 95 % of the rate.\n")
    heads = ["who", "noise", "have 95 % by 30", "least", "mean from 30", "after a change", "least", "mean", "above"]
    print(f"| {' | '.join([*heads, 'changes', 'memory'])} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    holds = True
    for noise in asked.noises:
        result = run(Rule, problems, noise)
        holds &= not result.above and min(result.at[0] + result.at[1]) >= GOAL
        print(row("rule", noise, [result]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        agents(asked.networks or Path(folder), asked)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
