"""Which job runs when, on which node and with which option, while some run already.

:func:`hydra_ext.plan.solve` of kind ``"spase"`` knows no jobs that run. So its plan gives each job an option, a node
and an order, and a serial schedule with the running jobs first gives the times. Random changes then improve it.
Running jobs move only where that pays.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from hydra_ext.plan import solve

LEAST_GAIN = 0.01  # of the makespan: a plan that gains less is within what estimates are wrong by
_CHANGES = 40  # for each job, that are tried to improve a plan
_MOST_PLACED = 30_000  # jobs placed in all these, which takes a few tenths of a second


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
class Held:
    """What a gang has now.

    Attributes:
        node: Where it runs.
        devices: Number of them.
        option: The one that it goes on with unless it is stopped; None if it was stopped already.
        leave: Seconds until its devices are free, if it is stopped now or was already.
    """

    node: str
    devices: int
    option: int | None
    leave: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job that has not ended.

    Attributes:
        name: Of the job.
        choices: Its options. Seconds are those behind a start, but for the option that it runs with.
        held: What its gang has; None if it has none.
    """

    name: str
    choices: Sequence[Choice]
    held: Held | None = None

    @property
    def option(self) -> int | None:
        """The option that it runs with, and may go on with; None if it waits or stops."""
        return None if self.held is None else self.held.option


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
        bound: Seconds that no plan can stay below; None if it is unknown.
        packs: Names of jobs that share a device.
    """

    jobs: Mapping[str, Placed]
    bound: float | None = None
    packs: Sequence[tuple[str, ...]] = ()

    @property
    def makespan(self) -> float:
        return max((placed.end for placed in self.jobs.values()), default=0.0)


class Planner(Protocol):
    """Makes plans as :func:`make_plan` does."""

    def __call__(
        self, works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None
    ) -> FleetPlan: ...


def make_plan(works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None) -> FleetPlan:
    """The best of: the plan that is followed now, one that leaves running jobs alone, and one that moves some.

    A plan that moves jobs has to gain more than 1 % of the makespan, with what the moves cost.

    Args:
        works: All jobs that have not ended; each has an option that fits a node.
        nodes: The devices of each node.
        before: The plan that is followed now; None at the beginning.
    """
    bound = lower_bound(works, nodes)
    followed = None if before is None else follow_plan(works, nodes, before)
    if followed is not None and followed.makespan * (1 - LEAST_GAIN) <= bound:
        return replace(followed, bound=bound)
    rng = random.Random(seed)
    best = _solved([_as_it_runs(work) for work in works], works, nodes, seed)
    if followed is not None and followed.makespan <= best.makespan:
        best = followed
    if any(work.held is not None for work in works):  # which the solver does not know
        waiting = [work for work in works if work.option is None]
        best = _improved(best, works, nodes, waiting, rng)
    if any(work.option is not None for work in works):
        moving = min(best, _solved(works, works, nodes, seed), key=lambda plan: plan.makespan)
        moving = _with_fewer_moves(_improved(moving, works, nodes, works, rng), works, nodes)
        best = min(best, _without_moves(moving, works, nodes), key=lambda plan: plan.makespan)
        if moving.makespan < best.makespan * (1 - LEAST_GAIN):
            best = moving
    return replace(best, bound=max(bound, best.bound or 0.0))


def lower_bound(works: Sequence[Work], nodes: Mapping[str, int]) -> float:
    """Seconds that no plan can stay below: all work spread evenly, or the longest job."""
    largest = max(nodes.values(), default=0)
    fitting = [[choice for choice in work.choices if choice.devices <= largest] for work in works]
    area = sum(min(choice.devices * choice.seconds for choice in each) for each in fitting)
    longest = max((min(choice.seconds for choice in each) for each in fitting), default=0.0)
    return max(area / max(1, sum(nodes.values())), longest)


def follow_plan(works: Sequence[Work], nodes: Mapping[str, int], before: FleetPlan) -> FleetPlan | None:
    """The plan before, with what is known by now; None if it has not all jobs, or a node that it needs is gone."""
    chosen = {}
    for work in works:
        placed = before.jobs.get(work.name)
        if placed is None:
            return None
        if work.held is not None and work.held.option is not None:  # it goes on where it is
            placed = replace(placed, option=work.held.option, node=work.held.node)
        if work.choices[placed.option].devices > nodes.get(placed.node, 0):
            return None
        chosen[work.name] = placed
    return arranged(works, nodes, chosen)


def _as_it_runs(work: Work) -> Work:
    if work.held is None or work.held.option is None:
        return work
    return Work(name=work.name, choices=[work.choices[work.held.option]], held=replace(work.held, option=0))


def _solved(asked: Sequence[Work], works: Sequence[Work], nodes: Mapping[str, int], seed: int) -> FleetPlan:
    """Options, nodes and order by the solver, which does not know that some jobs run already.

    Args:
        asked: The jobs as the solver sees them: all of ``works``, where some have only the option that they run with.
    """
    jobs = [
        {
            "name": work.name,
            "options": [
                {"gpus": choice.devices, "runtime_s": choice.seconds + _leave(work, number)}
                for number, choice in enumerate(work.choices)
            ],
        }
        for work in asked
    ]
    solution = solve("spase", {"nodes": list(nodes.values()), "jobs": jobs}, seed=seed)
    names, chosen = list(nodes), {}
    for work, given, found in zip(works, asked, solution.plan or [], strict=True):
        number, node, start = _read(found)
        option = work.option if given is not work and work.option is not None else number
        chosen[work.name] = Placed(option=option, node=names[node], start=start, end=start)
    # The bound holds for all plans if nothing runs: costs of moving, which it counts in full, overlap with other jobs.
    bound = None if any(work.held is not None for work in works) else solution.bound
    plans = [arranged(works, nodes, chosen, bound=bound, keeps_nodes=keeps) for keeps in (True, False)]
    return min(plans, key=lambda plan: plan.makespan)


def _read(found: object) -> tuple[int, int, float]:
    """A job's placement, as the solver gives it."""
    option, node, start = cast(tuple[int, int, float], found)
    return option, node, start


def _leave(work: Work, option: int) -> float:
    """Seconds before a job can start with an option."""
    return 0.0 if work.held is None or work.held.option == option else work.held.leave


def _improved(
    plan: FleetPlan, works: Sequence[Work], nodes: Mapping[str, int], changed: Sequence[Work], rng: random.Random
) -> FleetPlan:
    """The plan after random changes of one job or two, of which those stay that make it no worse.

    Args:
        changed: The jobs that get other options, nodes and places in the order.
    """
    if not changed:
        return plan
    names, largest = list(nodes), max(nodes.values())
    for _ in range(min(_CHANGES * len(works), _MOST_PLACED // len(works))):
        chosen = dict(plan.jobs)
        for work in rng.choices(changed, k=rng.choice((1, 1, 2))):
            option = rng.randrange(len(work.choices)) if rng.random() < 0.6 else chosen[work.name].option
            if work.choices[option].devices <= largest:
                start = rng.uniform(-1.0, plan.makespan)  # perhaps before all others
                chosen[work.name] = Placed(option=option, node=rng.choice(names), start=start, end=start)
        found = arranged(works, nodes, chosen, bound=plan.bound)
        if found.makespan <= plan.makespan:
            plan = found
    return plan


def _with_fewer_moves(plan: FleetPlan, works: Sequence[Work], nodes: Mapping[str, int]) -> FleetPlan:
    """The plan without the moves that gain nothing."""
    for work in works:
        if work.option is not None and plan.jobs[work.name].option != work.option:
            stays = {**plan.jobs, work.name: replace(plan.jobs[work.name], option=work.option)}
            found = [arranged(works, nodes, stays, bound=plan.bound, keeps_nodes=keeps) for keeps in (True, False)]
            without = min(found, key=lambda each: each.makespan)
            if without.makespan <= plan.makespan:
                plan = without
    return plan


def _without_moves(plan: FleetPlan, works: Sequence[Work], nodes: Mapping[str, int]) -> FleetPlan:
    options = {work.name: work.option for work in works if work.option is not None}
    stay = {name: replace(placed, option=options.get(name, placed.option)) for name, placed in plan.jobs.items()}
    return arranged(works, nodes, stay, bound=plan.bound)


def arranged(
    works: Sequence[Work],
    nodes: Mapping[str, int],
    chosen: Mapping[str, Placed],
    *,
    bound: float | None = None,
    keeps_nodes: bool = True,
) -> FleetPlan:
    """A serial schedule: first the jobs that go on as they run, then the others in order, each as early as it can.

    Without running jobs no job starts later than it is chosen to, if the nodes are kept.

    Args:
        chosen: Each job's option and node; the starts give the order.
        keeps_nodes: Whether jobs run on the nodes that are chosen, and not on those where they start first.
    """
    profiles = {name: _Profile(devices) for name, devices in nodes.items()}
    jobs, rest = {}, []
    for work in works:
        held, option = work.held, chosen[work.name].option
        seconds = work.choices[option].seconds
        if held is None or held.node not in profiles:
            rest.append(work)
        elif held.option == option:
            jobs[work.name] = Placed(option=option, node=held.node, start=0.0, end=seconds)
            profiles[held.node].take(0.0, seconds, held.devices)
        else:
            profiles[held.node].take(0.0, held.leave, held.devices)
            rest.append(work)
    rest.sort(key=lambda work: (chosen[work.name].start, work.name))
    for work in rest:
        placed = chosen[work.name]
        choice, after = work.choices[placed.option], _leave(work, placed.option)
        if keeps_nodes and nodes.get(placed.node, 0) >= choice.devices:
            node, start = placed.node, profiles[placed.node].earliest(choice.devices, choice.seconds, after)
        else:
            fitting = [name for name, devices in nodes.items() if devices >= choice.devices]
            starts = {name: profiles[name].earliest(choice.devices, choice.seconds, after) for name in fitting}
            node, start = min(starts.items(), key=lambda item: item[1])
        profiles[node].take(start, start + choice.seconds, choice.devices)
        jobs[work.name] = Placed(option=placed.option, node=node, start=start, end=start + choice.seconds)
    return FleetPlan(jobs=jobs, bound=bound)


class _Profile:
    """How many devices of a node are taken, from each time to the next."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._times = [0.0]
        self._taken = [0]

    def earliest(self, devices: int, seconds: float, after: float = 0.0) -> float:
        """The earliest time from ``after`` on from which so many devices are free for so long."""
        start, most = after, self._devices - devices
        for number in range(bisect_right(self._times, after) - 1, len(self._times)):
            if self._taken[number] > most:
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
