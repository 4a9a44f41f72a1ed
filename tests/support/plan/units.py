"""Schedules of shard units: what one takes, and all of them for a few units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Problem = dict[str, Any]
Plan = Sequence[Sequence[Sequence[Any]]]  # of each device: job, first unit, last unit, start
Unit = tuple[float, int, float]  # seconds, shard, bytes


@dataclass(frozen=True)
class Placed:
    job: int
    unit: int
    device: int
    start: float
    end: float


def chain(job: Mapping[str, Any]) -> list[Unit]:
    """All units of a job, in order."""
    times = job.get("epochs", 1) * job.get("batches", 1)
    if "units" in job:
        return [(unit[0], unit[1], unit[2] if len(unit) > 2 else 0.0) for unit in job["units"]] * times
    return [(seconds, place, 0.0) for place, seconds in enumerate(job["unit_seconds"])] * times


def placed(problem: Mapping[str, Any], plan: Plan) -> Iterator[Placed]:
    """Each unit of a plan, device by device."""
    chains = [chain(job) for job in problem["jobs"]]
    for device, runs in enumerate(plan):
        for job, first, last, start in runs:
            for unit in range(first, last + 1):
                end = start + chains[job][unit][0]
                yield Placed(job, unit, device, start, end)
                start = end


def judge(problem: Mapping[str, Any], plan: Plan) -> float:
    """The makespan. A ValueError unless each unit runs once, after those before it, on a free device, with its shard.

    A device's loads follow each other, and may begin at any time.
    """
    if len(plan) != problem["devices"]:
        raise ValueError(f"{len(plan)} of {problem['devices']} devices have a list")
    waiting: list[list[Placed]] = [[] for _ in plan]
    for each in placed(problem, plan):
        waiting[each.device].append(each)
    for queue in waiting:
        queue.reverse()
    state = _State(problem)
    makespan = 0.0
    while first := next((queue for queue in waiting if queue and queue[-1].unit == state.begun[queue[-1].job]), None):
        each = first.pop()
        earliest = state.run(each.job, each.device)
        if each.start < earliest:
            raise ValueError(f"{each} begins before {earliest}")
        state.ended(each.job, each.device, each.end)
        makespan = max(makespan, each.end)
    if any(waiting) or state.begun != [len(units) for units in state.chains]:
        raise ValueError(f"units that have run: {state.begun}; out of order: {waiting}")
    return makespan


def idles_in_vain(problem: Mapping[str, Any], plan: Plan) -> bool:
    """Whether a device waits while a unit is eligible."""
    units = list(placed(problem, plan))
    makespan = max((each.end for each in units), default=0.0)
    ends = {(each.job, each.unit): each.end for each in units}
    eligible = [(ends.get((each.job, each.unit - 1), 0.0), each.start) for each in units]
    for device in range(problem["devices"]):
        free = 0.0
        own = sorted((each.start, each.end) for each in units if each.device == device)
        for start, end in [*own, (makespan, makespan)]:
            if any(max(free, ready) < min(start, begun) for ready, begun in eligible):
                return True
            free = end
    return False


def bound(problem: Mapping[str, Any]) -> float:
    """What no schedule is shorter than, of compute alone."""
    work = [sum(unit[0] for unit in chain(job)) for job in problem["jobs"]]
    return float(max(sum(work) / problem["devices"], max(work, default=0.0)))


def shortest(problem: Mapping[str, Any]) -> float:
    """The least makespan, by trying all orders and devices."""
    state = _State(problem)
    best = float("inf")

    def visit(makespan: float) -> None:
        nonlocal best
        if max(makespan, state.least()) >= best:
            return
        waiting = [job for job, units in enumerate(state.chains) if state.begun[job] < len(units)]
        if not waiting:
            best = makespan
        for job in waiting:
            for device in range(problem["devices"]):
                before = state.saved()
                seconds = state.chains[job][state.begun[job]][0]
                end = state.run(job, device) + seconds
                state.ended(job, device, end)
                visit(max(makespan, end))
                state.restore(before)

    visit(0.0)
    return best


class _State:
    """Jobs and devices while units are placed one after the other."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        self.chains = [chain(job) for job in problem["jobs"]]
        self.begun = [0] * len(self.chains)
        self._link = problem.get("link")
        self._ready = [0.0] * len(self.chains)
        self._on: list[int | None] = [None] * len(self.chains)  # the device that ran the last unit
        self._free = [0.0] * problem["devices"]
        self._loaded = [0.0] * problem["devices"]
        self._last: list[int | None] = [None] * problem["devices"]  # the job of the last unit

    def run(self, job: int, device: int) -> float:
        """Begins the job's next unit. Returns the earliest start."""
        unit = self.begun[job]
        _, shard, nbytes = self.chains[job][unit]
        there = self._last[device] == job and self._on[job] == device and self.chains[job][unit - 1][1] == shard
        if self._link and nbytes and not there:
            self._loaded[device] += nbytes / self._link
            return max(self._free[device], self._ready[job], self._loaded[device])
        return max(self._free[device], self._ready[job])

    def ended(self, job: int, device: int, end: float) -> None:
        self.begun[job] += 1
        self._ready[job] = self._free[device] = end
        self._on[job], self._last[device] = device, job

    def least(self) -> float:
        """What the units that are left need at least."""
        rest = [
            sum(seconds for seconds, _, _ in units[begun:])
            for units, begun in zip(self.chains, self.begun, strict=True)
        ]
        longest = max((ready + each for ready, each in zip(self._ready, rest, strict=True)), default=0.0)
        return max(longest, (sum(self._free) + sum(rest)) / len(self._free))

    def saved(self) -> tuple[list[Any], ...]:
        return tuple(list(each) for each in self._lists())

    def restore(self, before: tuple[list[Any], ...]) -> None:
        for now, then in zip(self._lists(), before, strict=True):
            now[:] = then

    def _lists(self) -> tuple[list[Any], ...]:
        return self.begun, self._ready, self._on, self._free, self._loaded, self._last
