"""Which job runs when, on which node and with which option, while some run already.

:func:`hydra_ext.plan.solve` of kind ``"spase"`` knows no jobs that run. So its plan gives each job an option and an
order, and a serial schedule with the running jobs first gives the times. Running jobs move only where that pays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_ext.plan import solve
from hydra_ext.plan.solution import Solution

_LEAST_GAIN = 0.01  # of the makespan: a plan that gains less is within what estimates are wrong by


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a job, for planning.

    Attributes:
        devices: Of one node.
        seconds: From its start to its end; for a job that runs in this way now, from now on.
    """

    devices: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job that has not ended.

    Attributes:
        name: Of the job.
        choices: Its options; those of a running job that it does not run with include the move there.
        option: The one that it runs with now; None if it waits.
        node: Where it runs.
    """

    name: str
    choices: Sequence[Choice]
    option: int | None = None
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A job in a plan. Times are seconds from the plan's beginning."""

    option: int
    node: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """A plan for all jobs that have not ended.

    Attributes:
        jobs: By name.
        bound: Seconds that no plan can stay below, if none of the jobs ran already; None if it is unknown.
    """

    jobs: Mapping[str, Placed]
    bound: float | None = None

    @property
    def makespan(self) -> float:
        return max((placed.end for placed in self.jobs.values()), default=0.0)


def make_plan(works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None) -> FleetPlan:
    """The best of: a plan that may move running jobs, one that leaves them, and the plan that is followed now.

    Args:
        works: All jobs that have not ended; each has an option that fits a node.
        nodes: The devices of each node.
        before: The plan that is followed now; None at the beginning.
    """
    staying = [_as_it_runs(work) for work in works]
    stay = _solved(staying, works, nodes, seed)
    candidates = [stay]
    if before is not None and all(work.name in before.jobs for work in works):
        candidates.append(_followed(works, nodes, before))
    best = min(candidates, key=lambda plan: plan.makespan)
    if any(work.option is not None for work in works):
        move = _solved(list(works), works, nodes, seed)
        if move.makespan < best.makespan * (1 - _LEAST_GAIN):
            return move
    return best


def _as_it_runs(work: Work) -> Work:
    if work.option is None:
        return work
    return Work(name=work.name, choices=[work.choices[work.option]], option=0, node=work.node)


def _solved(asked: Sequence[Work], works: Sequence[Work], nodes: Mapping[str, int], seed: int) -> FleetPlan:
    """Options and order by the solver.

    Args:
        asked: The jobs as the solver sees them: all of ``works``, where some have only the option that they run with.
    """
    solution = _solution(asked, nodes, seed)
    chosen = {}
    for work, given, placed in zip(works, asked, solution.plan or [], strict=True):
        option, _, start = placed  # type: ignore[misc]
        whole = work.option if given is not work and work.option is not None else option
        chosen[work.name] = (int(whole), float(start))  # type: ignore[call-overload]
    return arranged(works, nodes, chosen, bound=solution.bound)


def _solution(works: Sequence[Work], nodes: Mapping[str, int], seed: int) -> Solution:
    jobs = [
        {
            "name": work.name,
            "options": [{"gpus": choice.devices, "runtime_s": choice.seconds} for choice in work.choices],
        }
        for work in works
    ]
    return solve("spase", {"nodes": list(nodes.values()), "jobs": jobs}, seed=seed)


def _followed(works: Sequence[Work], nodes: Mapping[str, int], before: FleetPlan) -> FleetPlan:
    """The plan that is followed now, with what is known by now."""
    chosen = {}
    for work in works:
        placed = before.jobs[work.name]
        chosen[work.name] = (placed.option if work.option is None else work.option, placed.start)
    return arranged(works, nodes, chosen, bound=None)


def arranged(
    works: Sequence[Work], nodes: Mapping[str, int], chosen: Mapping[str, tuple[int, float]], *, bound: float | None
) -> FleetPlan:
    """A serial schedule: first the jobs that go on as they run, then the others in order, each as early as it can.

    Args:
        chosen: Each job's option, and what orders the jobs.
    """
    profiles = {name: _Profile(devices) for name, devices in nodes.items()}
    jobs = {}
    going_on = [work for work in works if work.option is not None and work.option == chosen[work.name][0]]
    kept = {work.name for work in going_on}
    rest = sorted((work for work in works if work.name not in kept), key=lambda work: (chosen[work.name][1], work.name))
    for work in [*going_on, *rest]:
        option = chosen[work.name][0]
        choice = work.choices[option]
        if work.name in kept and work.node in profiles:
            node, start = work.node, 0.0
        else:
            fitting = [name for name, devices in nodes.items() if devices >= choice.devices]
            starts = {name: profiles[name].earliest(choice.devices, choice.seconds) for name in fitting}
            node = min(fitting, key=lambda name: starts[name])
            start = starts[node]
        profiles[node].take(start, start + choice.seconds, choice.devices)
        jobs[work.name] = Placed(option=option, node=node, start=start, end=start + choice.seconds)
    return FleetPlan(jobs=jobs, bound=bound)


class _Profile:
    """How many devices of a node are taken, from each time to the next."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._times = [0.0]
        self._taken = [0]

    def earliest(self, devices: int, seconds: float) -> float:
        """The earliest time from which so many devices are free for so long."""
        start = 0.0
        for number, taken in enumerate(self._taken):
            if taken + devices > self._devices:
                start = self._times[number + 1]  # the last entry has none taken
            elif number + 1 == len(self._times) or self._times[number + 1] >= start + seconds:
                return start
        return start

    def take(self, start: float, end: float, devices: int) -> None:
        first, last = self._border(start), self._border(end)
        for number in range(first, last):
            self._taken[number] += devices

    def _border(self, time: float) -> int:
        place = bisect_left(self._times, time)
        if place == len(self._times) or self._times[place] != time:
            self._times.insert(place, time)
            self._taken.insert(place, self._taken[place - 1])
        return place
