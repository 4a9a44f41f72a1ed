"""Which jobs share a device: pairs that take less time together than one after the other.

While one of them waits for its link, its update or its disk, the other computes: Hydra's SHARP (arXiv 2110.08633), by
:class:`hydra_ext.SharedDevice`. A job alone uses each resource of its device for a part of the time. Two use it for the
sum of their parts. Above one, that sum is the *slowdown*: a step of either takes that many times as long. So a pair of
like jobs gains if the slowdown is below two, by enough to pay for what the estimate leaves out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hydra_ext.fleet.scheduling.planning import Choice, Placed, Work
from hydra_ext.fleet.scheduling.records import JobRecord, JobState
from hydra_ext.fleet.scheduling.trials import Option, SharingOption

_MOST = 1.8  # slowdown of a pair: turns themselves take some percent


def slowdown(options: Sequence[Option]) -> float:
    """How many times longer a step takes if jobs with these options share a device."""
    parts: dict[str, float] = defaultdict(float)
    for option in options:
        for resource, seconds in option.loads.items() if isinstance(option, SharingOption) else ():
            parts[resource] += seconds / option.step_s
    return max([1.0, *parts.values()])


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


def together(jobs: Sequence[JobRecord], now: float, interval: float) -> Pack:
    """Jobs that run on one device, or would."""
    jobs = sorted(jobs, key=lambda job: job.name)
    options = [_shared(job) if job.running is None else job.running.option for job in jobs]
    factor = slowdown([job.options[option] for job, option in zip(jobs, options, strict=True)])
    works = [job.work(now, interval) for job in jobs]
    seconds = []
    for job, work, option in zip(jobs, works, options, strict=True):
        seconds.append(work.choices[option].seconds * (factor if job.running is None else 1.0))
    held = next((work.held for work in works if work.option is not None), works[0].held)
    if held is not None:
        leave = max(0.0 if work.held is None else work.held.leave for work in works)
        held = replace(held, option=None if held.option is None else 0, leave=leave)
    found = ends(seconds, factor)
    choice = Choice(devices=1, seconds=max(found))
    work = Work(name=" + ".join(job.name for job in jobs), choices=[choice], held=held)
    return Pack(tuple(jobs), work, tuple(options), tuple(found))


def paired(packs: Sequence[Pack], now: float, interval: float) -> list[Pack]:
    """The packs, with those of waiting jobs in pairs that gain: first those that gain the most.

    A pair gains if it takes a device for less time than both jobs take devices alone, each in its best way.
    """
    waiting = {pack.work.name: pack for pack in packs if len(pack.jobs) == 1 and may_share(pack.jobs[0])}
    options = {name: pack.jobs[0].options[_shared(pack.jobs[0])] for name, pack in waiting.items()}
    seconds = {name: pack.work.choices[_shared(pack.jobs[0])].seconds for name, pack in waiting.items()}
    alone = {
        name: min(choice.devices * choice.seconds for choice in pack.work.choices) for name, pack in waiting.items()
    }
    gains = []
    for one, other in combinations(sorted(waiting), 2):
        factor = slowdown([options[one], options[other]])
        gain = alone[one] + alone[other] - max(ends([factor * seconds[one], factor * seconds[other]], factor))
        if factor <= _MOST and gain > 0.0:
            gains.append((-gain, one, other))
    found, taken = [], set[str]()
    for _, one, other in sorted(gains):
        if not taken & {one, other}:
            taken |= {one, other}
            found.append(together([waiting[one].jobs[0], waiting[other].jobs[0]], now, interval))
    return [*(pack for pack in packs if pack.work.name not in taken), *found]


def may_share(job: JobRecord) -> bool:
    """Whether a job may begin beside another one. One that has failed since its newest checkpoint may not."""
    return job.state is JobState.WAITING and not job.failures and any(map(_is_shared, job.options))


def _shared(job: JobRecord) -> int:
    """The option with which it shares a device."""
    return next(number for number, option in enumerate(job.options) if _is_shared(option))


def _is_shared(option: Option) -> bool:
    return isinstance(option, SharingOption) and option.devices == 1
