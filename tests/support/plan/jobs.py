"""Schedules of jobs on nodes: what one takes, all of them for a few jobs, and random problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Problem = dict[str, Any]
Placed = Sequence[Any]  # option, node, start


def seconds(job: Mapping[str, Any], option: Mapping[str, Any]) -> float:
    return float(option["runtime_s"] if "runtime_s" in option else job["minibatches"] * option["seconds_per_minibatch"])


def judge(problem: Mapping[str, Any], plan: Sequence[Placed]) -> float:
    """The makespan of a plan. A ValueError if a node has too few GPUs at some time."""
    if len(plan) != len(problem["jobs"]):
        raise ValueError(f"{len(plan)} of {len(problem['jobs'])} jobs are placed")
    runs = []
    for job, (option, node, start) in zip(problem["jobs"], plan, strict=True):
        chosen = job["options"][option]
        runs.append((start, start + seconds(job, chosen), chosen["gpus"], node))
    for moment, _, _, node in runs:  # use only rises where a job starts
        used = sum(gpus for start, end, gpus, where in runs if where == node and start <= moment < end)
        if moment < 0 or used > problem["nodes"][node]:
            raise ValueError(f"{used} of {problem['nodes'][node]} GPUs of node {node} are in use at {moment}")
    return max((end for _, end, _, _ in runs), default=0.0)


def shortest(problem: Mapping[str, Any]) -> float:
    """The least makespan, by trying all options, nodes and orders."""
    jobs, nodes = problem["jobs"], range(len(problem["nodes"]))
    places = [[(option, node) for option in range(len(job["options"])) for node in nodes] for job in jobs]
    best = float("inf")
    for order in itertools.permutations(range(len(jobs))):
        for chosen in itertools.product(*places):
            if all(jobs[i]["options"][o]["gpus"] <= problem["nodes"][n] for i, (o, n) in enumerate(chosen)):
                best = min(best, _makespan(problem, order, chosen))
    return best


def _makespan(problem: Mapping[str, Any], order: Sequence[int], chosen: Sequence[tuple[int, int]]) -> float:
    """Each job starts as early as those before it allow."""
    free = [[0.0] * gpus for gpus in problem["nodes"]]
    makespan = 0.0
    for i in order:
        option, node = chosen[i]
        job = problem["jobs"][i]
        count = job["options"][option]["gpus"]
        end = sorted(free[node])[count - 1] + seconds(job, job["options"][option])
        free[node] = sorted([*sorted(free[node])[count:], *[end] * count])
        makespan = max(makespan, end)
    return makespan


def make_problem(rng: random.Random, *, jobs: int, nodes: Sequence[int], options: int, longest: int = 30) -> Problem:
    """Whole seconds, which may rise or fall with the GPUs. Every job fits some node."""
    largest = max(nodes)
    made = []
    for i in range(jobs):
        counts = [rng.randint(1, largest), *(rng.randint(1, largest + 1) for _ in range(rng.randrange(options)))]
        made.append(
            {
                "name": f"job{i}",
                "options": [{"gpus": gpus, "runtime_s": float(rng.randint(1, longest))} for gpus in counts],
            }
        )
    return {"nodes": list(nodes), "jobs": made}


def curves(count: int, nodes: Sequence[int], curve: Sequence[tuple[int, float]]) -> Problem:
    """Equal jobs with these GPUs and seconds."""
    options = [{"gpus": gpus, "runtime_s": runtime} for gpus, runtime in curve]
    return {"nodes": list(nodes), "jobs": [{"name": f"job{i}", "options": options} for i in range(count)]}


def small_problem(seed: int) -> Problem:
    """A few jobs on one node or several, equal or not."""
    rng = random.Random(seed)
    nodes = rng.choice(([1], [2], [4], [2, 2], [1, 3], [1, 2, 2]))
    return make_problem(rng, jobs=rng.randint(1, 3 if len(nodes) > 2 else 4), nodes=nodes, options=3)
