"""Schedules of jobs on nodes by the rules that SPASE planners are compared with (Saturn, VLDB 2024, section 5).

Each takes a problem of kind ``spase`` and returns its plan: an option, a node and a start for each job.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Problem = Mapping[str, Any]
Plan = list[list[Any]]


def seconds_of(job: Mapping[str, Any], option: Mapping[str, Any]) -> float:
    return float(option["runtime_s"] if "runtime_s" in option else job["minibatches"] * option["seconds_per_minibatch"])


def makespan_of(problem: Problem, plan: Plan) -> float:
    """A ValueError if a node has too few GPUs at some time."""
    changes: list[list[tuple[float, int]]] = [[] for _ in problem["nodes"]]
    end = 0.0
    for job, (option, node, start) in zip(problem["jobs"], plan, strict=True):
        chosen = job["options"][option]
        end = max(end, start + seconds_of(job, chosen))
        changes[node] += [(start, chosen["gpus"]), (start + seconds_of(job, chosen), -chosen["gpus"])]
    for gpus, own in zip(problem["nodes"], changes, strict=True):
        used = 0
        for moment, change in sorted(own):  # at one moment ends come before starts
            used += change
            if used > gpus or moment < 0:
                raise ValueError(f"{used} of {gpus} GPUs are in use at {moment}")
    return end


def fastest(job: Mapping[str, Any], gpus: int) -> dict[int, int]:
    """For each number of GPUs of at most ``gpus``, ascending, the fastest option with it."""
    best: dict[int, int] = {}
    for i, option in enumerate(job["options"]):
        known = best.get(option["gpus"])
        if option["gpus"] <= gpus and (
            known is None or seconds_of(job, option) < seconds_of(job, job["options"][known])
        ):
            best[option["gpus"]] = i
    return dict(sorted(best.items()))


def largest_first(problem: Problem) -> Plan:
    """Max-Heuristic, the current practice: a job has all GPUs of a node that it can use, one job after another."""
    ends = [0.0] * len(problem["nodes"])
    plan: Plan = []
    for job in problem["jobs"]:
        node = min((n for n, gpus in enumerate(problem["nodes"]) if fastest(job, gpus)), key=lambda n: ends[n])
        option = list(fastest(job, problem["nodes"][node]).values())[-1]
        plan.append([option, node, ends[node]])
        ends[node] += seconds_of(job, job["options"][option])
    return plan


def smallest_first(problem: Problem) -> Plan:
    """Min-Heuristic: each job has its fewest GPUs; spare ones go to the jobs of a wave in turn."""
    return _in_waves(problem, lambda job, now, larger: -now)


def optimus(problem: Problem) -> Plan:
    """Optimus*-Greedy, in waves: a spare GPU goes to the job that it saves the most seconds."""

    def saved(job: Mapping[str, Any], now: int, larger: int) -> float:
        sizes = fastest(job, larger)
        return seconds_of(job, job["options"][sizes[now]]) - seconds_of(job, job["options"][sizes[larger]])

    return _in_waves(problem, saved)


def drawn(problem: Problem, seed: int) -> Plan:
    """Random options, nodes and order; each job starts as early as those before it allow."""
    rng = random.Random(seed)
    free = [[0.0] * gpus for gpus in problem["nodes"]]
    plan: Plan = [[] for _ in problem["jobs"]]
    for i in rng.sample(range(len(plan)), len(plan)):
        job = problem["jobs"][i]
        node = rng.choice([n for n, gpus in enumerate(problem["nodes"]) if fastest(job, gpus)])
        gpus, option = rng.choice(list(fastest(job, problem["nodes"][node]).items()))
        start = free[node][gpus - 1]
        plan[i] = [option, node, start]
        free[node] = sorted([*free[node][gpus:], *[start + seconds_of(job, job["options"][option])] * gpus])
    return plan


def _in_waves(problem: Problem, worth: Any) -> Plan:
    """Starts as many jobs as fit with their fewest GPUs, hands out what is spare, and waits until all have ended.

    ``worth(job, now, larger)`` ranks the step to the next larger number of GPUs; a step that saves nothing is not made.
    """
    plan: Plan = [[] for _ in problem["jobs"]]
    left = list(range(len(plan)))
    begin = 0.0
    while left:
        wave = dict(_wave(problem, left))  # the node and the GPUs of each
        spare = list(problem["nodes"])
        for node, gpus in wave.values():
            spare[node] -= gpus
        while steps := list(_steps(problem, wave, spare)):
            i, larger = max(steps, key=lambda step: worth(problem["jobs"][step[0]], wave[step[0]][1], step[1]))
            node, now = wave[i]
            spare[node] -= larger - now
            wave[i] = (node, larger)
        end = begin
        for i, (node, gpus) in wave.items():
            job = problem["jobs"][i]
            option = fastest(job, gpus)[gpus]
            plan[i] = [option, node, begin]
            end = max(end, begin + seconds_of(job, job["options"][option]))
        left = [i for i in left if i not in wave]
        begin = end
    return plan


def _wave(problem: Problem, left: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    spare = list(problem["nodes"])
    for i in left:
        fewest = {n: min(sizes) for n, free in enumerate(spare) if (sizes := fastest(problem["jobs"][i], free))}
        if fewest:
            node = max(fewest, key=lambda n: spare[n])
            spare[node] -= fewest[node]
            yield i, (node, fewest[node])


def _steps(problem: Problem, wave: Mapping[int, tuple[int, int]], spare: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The jobs that a larger number of GPUs would make faster, and that number."""
    for i, (node, now) in wave.items():
        job = problem["jobs"][i]
        sizes = fastest(job, now + spare[node])
        for larger in sizes:
            if larger > now and seconds_of(job, job["options"][sizes[larger]]) < seconds_of(
                job, job["options"][sizes[now]]
            ):
                yield i, larger
                break
