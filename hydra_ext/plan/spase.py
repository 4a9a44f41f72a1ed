"""Which option each of several jobs runs with, on which node and from when on: Saturn's SPASE (VLDB 2024).

The search (csrc/plan/jobs/job_plan.h) is annealing over lists, with proved bounds; a few jobs are searched exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, count
from hydra_ext.plan.solution import Solution

_JobValues = tuple[str, list[tuple[int, float]]]


def solve(problem: Mapping[str, object], *, seed: int = 0, effort: int = 1) -> Solution:
    """Finds a schedule with a short makespan.

    A job runs once, on one node, without a break. Jobs that run at once on a node need at most as many GPUs as it has.

    Args:
        problem: A mapping with ``nodes``, the GPUs of each, and ``jobs``. A job has a ``name``, and ``options`` with
            ``gpus`` and either ``runtime_s`` or ``seconds_per_minibatch``; the latter needs the job's ``minibatches``.
            ``gpus`` may say what all nodes have together. Other keys are not read.
        seed: Of the search: equal problems, seeds and efforts have equal plans.
        effort: Passes of the search. More never give a longer makespan, and take longer.

    Returns:
        The solution. Its objective is the makespan in seconds. Its plan has ``[option, node, start]`` for each job, as
        places in their lists and seconds. Its bound is proved, and mostly below the objective.

    Raises:
        PlanError: A key is missing, a value has the wrong type or sign, or a job fits no node.
    """
    given = Fields(problem, "problem")
    nodes = [count(gpus, f"problem['nodes'][{i}]") for i, gpus in enumerate(given.items("nodes"))]
    if given.has("gpus") and given.count("gpus") != sum(nodes):
        raise PlanError(
            f"problem['gpus'] is {given.count('gpus')}, and problem['nodes'] have {sum(nodes)}: give equal numbers, or "
            "leave problem['gpus'] out"
        )
    jobs = [_read_job(Fields(job, f"jobs[{i}]"), f"jobs[{i}]") for i, job in enumerate(given.items("jobs"))]
    placements, makespan, bound = _C.plan_jobs(nodes, jobs, seed=seed, effort=effort)
    return Solution(objective=makespan, plan=[list(placed) for placed in placements], bound=bound)


def _read_job(job: Fields, name: str) -> _JobValues:
    options = [Fields(option, f"{name}['options'][{i}]") for i, option in enumerate(job.items("options"))]
    return job.text("name"), [(option.count("gpus"), _seconds(job, option)) for option in options]


def _seconds(job: Fields, option: Fields) -> float:
    if option.has("runtime_s") or not (option.has("seconds_per_minibatch") or job.has("minibatches")):
        return option.amount("runtime_s")
    return job.amount("minibatches") * option.amount("seconds_per_minibatch")
