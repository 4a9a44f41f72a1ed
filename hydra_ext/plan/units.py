"""Which of several trainings a device runs next, unit by unit: Hydra's Sharded-LRTF (arXiv 2110.08633).

A model is cut into shards, and a unit is the forward or backward of one shard for a minibatch. The scheduler
(csrc/plan/units/unit_scheduler.h) is the one that a run can ask; here it is asked until all units have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, amount, items, size
from hydra_ext.plan.solution import Solution

POLICIES = {
    "lrtf": _C.UnitPolicy.LONGEST,
    "lrtf_affinity": _C.UnitPolicy.LONGEST_RESIDENT,
    "random": _C.UnitPolicy.RANDOM,
    "round_robin": _C.UnitPolicy.ROUND_ROBIN,
    "shortest_first": _C.UnitPolicy.SHORTEST,
}

_UnitValues = tuple[float, int, float]
_JobValues = tuple[str, list[_UnitValues], int]


def solve(problem: Mapping[str, object], *, seed: int = 0) -> Solution:
    """Schedules all units.

    Args:
        problem: A mapping with ``devices``, their number, and ``jobs``. A job has a ``name``, and either ``units``, of
            ``[seconds, shard]`` or ``[seconds, shard, bytes]``, or ``unit_seconds``, if each unit has a shard of its
            own and loads take no time. These repeat ``epochs`` times ``batches`` times; both are 1 if left out.
            ``link`` has the bytes per second to each device; without it loads take no time. ``policy`` is
            ``"lrtf"``, the default, ``"lrtf_affinity"``, ``"round_robin"``, ``"random"`` or ``"shortest_first"``. Other
            keys are not read.
        seed: For ``"random"``: equal seeds have equal plans.

    Returns:
        The solution. Its objective is the makespan in seconds. Its plan has a list for each device, of
        ``[job, first unit, last unit, start]``: the job's place in the list, units by their places in the job, and the
        start in seconds. These units follow each other without a wait. The bound is proved.

    Raises:
        PlanError: A key is missing, or a value has the wrong type or sign.
    """
    schedule = simulate(problem, seed=seed)
    plan: list[object] = [[list(run) for run in runs] for runs in schedule.runs]
    return Solution(objective=schedule.makespan, plan=plan, bound=schedule.bound)


def simulate(problem: Mapping[str, object], *, seed: int = 0) -> _C.UnitSchedule:
    """The same, with what each device was busy, and the seconds of loads and of waits for them.

    Raises:
        PlanError: As in :func:`solve`.
    """
    given = Fields(problem, "problem")
    jobs = [_read_job(Fields(job, f"jobs[{i}]"), f"jobs[{i}]") for i, job in enumerate(given.items("jobs"))]
    link = given.positive("link") if given.has("link") else None
    return _C.simulate_units(given.count("devices"), jobs, link=link, policy=_policy(given), seed=seed)


def _policy(given: Fields) -> _C.UnitPolicy:
    name = given.text("policy") if given.has("policy") else "lrtf"
    if name not in POLICIES:
        raise PlanError(f"problem['policy'] is {name!r}: give one of {', '.join(POLICIES)}")
    return POLICIES[name]


def _read_job(job: Fields, name: str) -> _JobValues:
    return job.text("name"), _read_units(job, name), _times(job, "epochs") * _times(job, "batches")


def _times(job: Fields, key: str) -> int:
    return job.count(key) if job.has(key) else 1


def _read_units(job: Fields, name: str) -> list[_UnitValues]:
    if job.has("unit_seconds") and not job.has("units"):
        seconds = enumerate(job.items("unit_seconds"))
        return [(amount(value, f"{name}['unit_seconds'][{i}]"), i, 0.0) for i, value in seconds]
    units = enumerate(job.items("units"))
    return [_read_unit(items(unit, f"{name}['units'][{i}]"), f"{name}['units'][{i}]") for i, unit in units]


def _read_unit(unit: Sequence[object], name: str) -> _UnitValues:
    if not 2 <= len(unit) <= 3:
        raise PlanError(f"{name} has {len(unit)} entries: give [seconds, shard] or [seconds, shard, bytes]")
    nbytes = amount(unit[2], f"{name}[2]") if len(unit) == 3 else 0.0
    return amount(unit[0], f"{name}[0]"), size(unit[1], f"{name}[1]"), nbytes
