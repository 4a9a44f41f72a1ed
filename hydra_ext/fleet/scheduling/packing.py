"""Which jobs share a device: those that take less time together than one after the other.

While one of a pair waits for its link, its update or its disk, the other computes: Hydra's SHARP (arXiv 2110.08633), by
:class:`hydra_ext.SharedDevice`. A job alone uses each resource of its device for a part of the time. Two use it for the
sum of their parts. Above one, that sum is the *slowdown*: a step of either takes that many times as long. So a pair of
like jobs gains if the slowdown is below two, by enough to pay for what the estimate leaves out.

Jobs that train adapters of one base make their steps together (:mod:`hydra_ext.fleet.techniques.common`): weights are
fetched once for all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hydra_ext.fleet.scheduling.planning import Choice, Placed, Work
from hydra_ext.fleet.scheduling.records import JobRecord, JobState
from hydra_ext.fleet.scheduling.trials import Option, SharingOption
from hydra_ext.fleet.techniques.common import CommonBase

_MOST = 0.9  # of the time one after the other that sharing may take: it takes some percent itself
_FETCHES = "host to device"


def slowdowns(options: Sequence[Option]) -> list[float]:
    """How many times longer each one's step takes if jobs with these options share a device."""
    sharing = [option for option in options if isinstance(option, SharingOption)]
    if len(sharing) < 2:
        return [1.0] * len(options)
    if is_common(sharing[0]):  # a step of all of them, which fetches the base once
        loads = {
            resource: (max if resource == _FETCHES else sum)(option.loads.get(resource, 0.0) for option in sharing)
            for resource in sharing[0].loads
        }
        loads["compute"] = loads.get("compute", 0.0) + loads.pop("optimizer", 0.0)  # updates come behind the backward
        seconds = max(*loads.values(), *(option.step_s for option in sharing))
        return [seconds / option.step_s for option in sharing]
    parts: dict[str, float] = defaultdict(float)
    for option in sharing:
        for resource, seconds in option.loads.items():
            parts[resource] += seconds / option.step_s
    return [max([1.0, *parts.values()])] * len(options)


def ends(seconds: Sequence[float], factor: float) -> list[float]:
    """When each job of a pack ends.

    Args:
        seconds: That each would take if the others never ended.
        factor: The slowdown, which is over when only one job is left.
    """
    behind = sorted(seconds)[-2] if len(seconds) > 1 else 0.0
    return [each if each <= behind else behind + (each - behind) / factor for each in seconds]


@dataclass(frozen=True)
class Pack:
    """What the planner sees as one job: a job, or several that share a device.

    Attributes:
        jobs: By name.
        work: Of all of them.
        options: With which each runs; empty for a job alone.
        ends: When each ends, in seconds from now or from their start; empty for a job alone.
    """

    jobs: tuple[JobRecord, ...]
    work: Work
    options: tuple[int, ...] = ()
    ends: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(job.name for job in self.jobs)

    def placed(self, placed: Placed) -> dict[str, Placed]:
        """Each job's place in a plan that has the pack's."""
        if not self.options:
            return {self.work.name: placed}
        return {
            name: replace(placed, option=option, end=placed.start + end)
            for name, option, end in zip(self.names, self.options, self.ends, strict=True)
        }


def together(jobs: Sequence[JobRecord], now: float, interval: float, *, common: bool = False) -> Pack:
    """Jobs that run on one device, or would.

    Args:
        common: Whether jobs that wait would make their steps together.
    """
    jobs = sorted(jobs, key=lambda job: job.name)
    numbers = [_sharing(job, common=common) if job.running is None else job.running.option for job in jobs]
    options = [job.options[number] for job, number in zip(jobs, numbers, strict=True)]
    factors = slowdowns(options)
    works = [job.work(now, interval) for job in jobs]
    seconds = [
        work.choices[number].seconds * (factor if job.running is None else 1.0)
        for job, work, number, factor in zip(jobs, works, numbers, factors, strict=True)
    ]
    held = next((work.held for work in works if work.option is not None), works[0].held)
    if held is not None:
        leave = max(0.0 if work.held is None else work.held.leave for work in works)
        held = replace(held, option=None if held.option is None else 0, leave=leave)
    if is_common(options[0]):  # they open one after the other
        opening = sum(option.open_s for job, option in zip(jobs, options, strict=True) if job.running is None)
        found = [each + opening for each in seconds]
    else:
        found = ends(seconds, factors[0])
    choice = Choice(devices=1, seconds=max(found))
    work = Work(name=" + ".join(job.name for job in jobs), choices=[choice], held=held)
    return Pack(tuple(jobs), work, tuple(numbers), tuple(found))


def alternatives(packs: Sequence[Pack], devices: int, now: float, interval: float) -> list[list[Pack]]:
    """The packs, with those of waiting jobs in groups and pairs that gain.

    Args:
        devices: Number of all.
    """
    groups = gathered(packs, devices, now, interval)
    found = [paired(packs, now, interval), groups, paired(groups, now, interval)]
    return [each for place, each in enumerate(found) if len(each) < len(packs) and each not in found[:place]]


def gathered(packs: Sequence[Pack], devices: int, now: float, interval: float) -> list[Pack]:
    """The packs, with those of waiting jobs that have one base in groups that gain: one for each device, if it can."""
    waiting: dict[str, list[Pack]] = defaultdict(list)
    for pack in packs:
        number = _sharing(pack.jobs[0], common=True) if _may_begin(pack, common=True) else None
        option = None if number is None else pack.jobs[0].options[number]
        if isinstance(option, SharingOption):
            waiting[option.base_for(int(pack.jobs[0].job["seed"]))].append(pack)
    found, taken = [], set[str]()
    for base in sorted(waiting):
        own = sorted(waiting[base], key=lambda pack: (-_alone(pack), pack.work.name))  # like ones end together
        count = max(math.ceil(len(own) / CommonBase.tenants), min(devices, len(own) // 2), 1)
        size = math.ceil(len(own) / count)
        for place in range(0, len(own), size):
            group = own[place : place + size]
            pack = together([each.jobs[0] for each in group], now, interval, common=True)
            if len(group) > 1 and pack.work.choices[0].seconds <= _MOST * sum(map(_alone, group)):
                taken |= {each.work.name for each in group}
                found.append(pack)
    return [*(pack for pack in packs if pack.work.name not in taken), *found]


def paired(packs: Sequence[Pack], now: float, interval: float) -> list[Pack]:
    """The packs, with those of waiting jobs in pairs that gain: first those that gain the most.

    A pair gains if it takes a device for less time than both jobs take devices alone, each in its best way.
    """
    waiting = {pack.work.name: pack for pack in packs if _may_begin(pack, common=False)}
    numbers = {name: _sharing(pack.jobs[0], common=False) for name, pack in waiting.items()}
    options = {name: pack.jobs[0].options[numbers[name]] for name, pack in waiting.items()}
    seconds = {name: pack.work.choices[numbers[name]].seconds for name, pack in waiting.items()}
    gains = []
    for one, other in combinations(sorted(waiting), 2):
        factor = slowdowns([options[one], options[other]])[0]
        pair = max(ends([factor * seconds[one], factor * seconds[other]], factor))
        gain = _alone(waiting[one]) + _alone(waiting[other]) - pair
        if factor <= 2 * _MOST and gain > 0.0:
            gains.append((-gain, one, other))
    found, taken = [], set[str]()
    for _, one, other in sorted(gains):
        if not taken & {one, other}:
            taken |= {one, other}
            found.append(together([waiting[one].jobs[0], waiting[other].jobs[0]], now, interval))
    return [*(pack for pack in packs if pack.work.name not in taken), *found]


def _alone(pack: Pack) -> float:
    """Seconds of a device that a job takes in its best way."""
    return min(choice.devices * choice.seconds for choice in pack.work.choices)


def may_share(job: JobRecord) -> bool:
    """Whether a job may begin beside another one. One that has failed since its newest checkpoint may not."""
    is_able = any(isinstance(option, SharingOption) and option.devices == 1 for option in job.options)
    return job.state is JobState.WAITING and not job.failures and is_able


def _may_begin(pack: Pack, *, common: bool) -> bool:
    return len(pack.jobs) == 1 and may_share(pack.jobs[0]) and any(_sharings(pack.jobs[0], common=common))


def _sharing(job: JobRecord, *, common: bool) -> int:
    """The option with which it shares a device."""
    return next(number for number, is_one in enumerate(_sharings(job, common=common)) if is_one)


def _sharings(job: JobRecord, *, common: bool) -> list[bool]:
    """For each option, whether a job shares a device with it."""
    return [
        isinstance(option, SharingOption) and option.devices == 1 and is_common(option) is common
        for option in job.options
    ]


def is_common(option: Option) -> bool:
    """Whether jobs with this option that share a device make their steps together."""
    return bool(option.configuration.get("base"))
