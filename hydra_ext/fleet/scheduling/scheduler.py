"""Runs jobs by a plan, and plans again: when a job ends or fails, when nodes come or go, and at intervals.

It knows neither processes nor clocks: a :class:`~hydra_ext.fleet.cluster.Cluster` has them, which may be simulated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra_ext.errors import StateError
from hydra_ext.fleet.cluster.interface import Cluster, Event, Failure, Node, Order, Progress, Task
from hydra_ext.fleet.scheduling.agenda import Agenda
from hydra_ext.fleet.scheduling.packing import Pack, alternatives, is_common, may_share, slowdowns, together
from hydra_ext.fleet.scheduling.planning import LEAST_GAIN, FleetPlan, Placed, Planner, Work, make_plan
from hydra_ext.fleet.scheduling.records import ENDED, SHORTEST, JobRecord, JobState, Running
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.scheduling.trials import Option

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # of a job in a row, without a new checkpoint in between
_OPEN = 5.0  # seconds to add to the patience for a gang's first step, at least: processes start, models are built
_WEIGHT = 0.2  # of a new step in the mean of a job's seconds a step
_AS_PLANNED = 0.05  # of the makespan: a job that ends so much earlier or later than planned leaves the plan as it is


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is asked while jobs run.

    Attributes:
        name: Of the job.
        added: A job that begins, or goes on after it had ended; None for one that is to stop.
    """

    name: str
    added: JobRecord | None = None


class Desk:
    """Where the scheduler tells what happens, and asks what to change. This one asks for nothing.

    Attributes:
        every: Seconds between looks.
    """

    every = float("inf")

    @property
    def wants_all_devices(self) -> bool:
        """Whether all running jobs are to save and end, and :meth:`Scheduler.run` to return."""
        return False

    def hear(self, job: str, record: Mapping[str, Any]) -> bool:
        """Hears a record of a job's progress. Returns whether to stop the job."""
        return False

    def look(self, open_jobs: int) -> Iterable[Change]:
        """The changes that have been asked for since."""
        return ()

    def ended(self, job: str, state: JobState) -> None:
        """Hears that a job does not go on."""


class Scheduler:
    """
    Args:
        record: Called with each decision and its details, for the journal.
        planner: Makes the plans.
        desk: Told what happens, and asked for changes.
    """

    def __init__(
        self,
        cluster: Cluster,
        jobs: Sequence[JobRecord],
        settings: Settings,
        *,
        gangs: Iterator[int],
        record: Callable[..., None],
        planner: Planner = make_plan,
        desk: Desk | None = None,
    ) -> None:
        self._cluster = cluster
        self._jobs = {job.name: job for job in jobs}
        self._settings = settings
        self._gangs = gangs
        self._record = record
        self._planner = planner
        self._running: dict[int, JobRecord] = {}  # by gang
        self._desk = desk or Desk()
        self._plan: FleetPlan | None = None
        self._nodes: dict[str, Node] = {}
        self._agenda = Agenda(settings.interval)
        self.plans = 0

    def admit(self, jobs: Sequence[JobRecord]) -> None:
        """Takes in jobs that begin, or go on after they had ended."""
        for job in jobs:
            before = self._jobs.get(job.name)
            if before is not None and before.running is not None:  # it is about to stop, and goes on behind that
                before.state = JobState.MOVING
            else:
                self._jobs[job.name] = job
        if jobs:
            self._agenda.insist(self._cluster.now())

    def run(self) -> None:
        """Runs all jobs until each has ended, with its gang; or until the desk wants all devices, and has them.

        Raises:
            StateError: Jobs are left and no node has the devices for them; all others have ended.
        """
        self._look_at_nodes()
        self._look_at_desk()
        while self._open_jobs() or self._running:
            if self._desk.wants_all_devices:
                self._clear()
                if not self._running:
                    return
            elif self._plan is None or self._cluster.now() >= self._agenda.next:
                self._make_plan()
            if not self._desk.wants_all_devices:
                self._dispatch()
                if not self._running:
                    raise self._too_large()
            for event in self._cluster.wait(self._seconds_to_wait()):
                self._hear(event)
            self._look_for_hanging()
            self._look_at_nodes()
            self._look_at_desk()

    # ---- changes ----------------------------------------------------------------------------------------------------

    def _look_at_desk(self) -> None:
        for change in self._desk.look(len(self._open_jobs())):
            if change.added is not None:
                self.admit([change.added])
            elif change.name in self._jobs:
                self._stop(self._jobs[change.name])
            else:
                logger.warning("there is no job %s to stop", change.name)

    def _stop(self, job: JobRecord) -> None:
        if job.state in ENDED or job.state is JobState.STOPPING:
            return
        if job.running is None:
            self._end(job, JobState.STOPPED)
            return
        if job.state is JobState.RUNNING:
            self._cluster.stop(job.running.gang)
        job.state = JobState.STOPPING
        self._record("stopping", job=job.name, at=self._cluster.now(), step=job.step)

    def _end(self, job: JobRecord, state: JobState) -> None:
        """A job does not go on."""
        job.state = state
        if state is JobState.STOPPED:
            self._record("stopped", job=job.name, at=self._cluster.now(), step=job.step)
            self._agenda.hurry(self._cluster.now())
        self._desk.ended(job.name, state)

    def _clear(self) -> None:
        """Asks all gangs to save and end; their jobs wait then."""
        for gang, job in self._running.items():
            if job.state is JobState.RUNNING:
                job.state = JobState.MOVING
                self._cluster.stop(gang)
        self._plan = None

    # ---- planning ---------------------------------------------------------------------------------------------------

    def _open_jobs(self) -> list[JobRecord]:
        return [job for job in self._jobs.values() if job.state not in ENDED]

    def _look_at_nodes(self) -> None:
        there = {node.name: node for node in self._cluster.nodes()}
        if there != self._nodes:
            self._nodes = there
            self._agenda.insist(self._cluster.now())

    def _make_plan(self) -> None:
        now = self._cluster.now()
        sizes = {name: len(node.devices) for name, node in self._nodes.items()}
        most = max(sizes.values(), default=0)
        planned = [job for job in self._open_jobs() if _least_devices(job) <= most]
        packs = self._packs(planned, now)
        self._plan = self._best(packs, sizes, now) if packs else FleetPlan(jobs={})
        self._agenda.note(now, self._cluster.now())
        if not packs:
            return
        self.plans += 1
        self._record(
            "plan",
            at=now,
            makespan=self._plan.makespan,
            bound=self._plan.bound,
            packs=self._plan.packs,
            jobs={name: [each.option, each.node, each.start, each.end] for name, each in self._plan.jobs.items()},
        )
        for pack in packs:
            job, work = pack.jobs[0], pack.work
            option = self._plan.jobs[job.name].option
            if len(pack.jobs) == 1 and job.running is not None and work.option is not None and option != work.option:
                job.state = JobState.MOVING
                self._record("move", job=job.name, at=now, option=option)
                self._cluster.stop(job.running.gang)

    def _packs(self, jobs: Sequence[JobRecord], now: float) -> list[Pack]:
        """The jobs that share devices now, and the others."""
        groups: dict[int | str, list[JobRecord]] = {}
        for job in jobs:
            goes_on = job.running is not None and job.state is JobState.RUNNING and not job.running.verdict
            groups.setdefault(job.running.process if job.running and goes_on else job.name, []).append(job)
        interval = self._settings.interval
        packs = [
            together(group, now, interval) if len(group) > 1 else Pack((group[0],), group[0].work(now, interval))
            for group in groups.values()
        ]
        return [replace(pack, work=self._held_on_nodes(pack.work)) for pack in packs]

    def _held_on_nodes(self, work: Work) -> Work:
        if work.held is not None and work.held.node not in self._nodes:
            return replace(work, held=None)  # its gang is lost, and its end is about to be told
        return work

    def _best(self, packs: Sequence[Pack], sizes: Mapping[str, int], now: float) -> FleetPlan:
        """The plan without further packs, or one with them that gains."""
        best = self._planned(packs, sizes, now)
        others = alternatives(packs, sum(sizes.values()), now, self._settings.interval)
        for each in others:
            other = self._planned(each, sizes, now)
            if other.makespan < best.makespan * (1 - LEAST_GAIN):
                best = other
        return replace(best, bound=None) if others else best  # which holds for its packs only

    def _planned(self, packs: Sequence[Pack], sizes: Mapping[str, int], now: float) -> FleetPlan:
        """A plan of jobs, by one of packs."""
        # The number of the plan as seed: each search takes other ways, and the plan that is followed stays if it is
        # better.
        before = None if self._plan is None else _of_packs(self._plan, packs, now - self._agenda.made)
        plan = self._planner([pack.work for pack in packs], sizes, seed=self.plans, before=before)
        jobs: dict[str, Placed] = {}
        for pack in packs:
            jobs |= pack.placed(plan.jobs[pack.work.name])
        return FleetPlan(jobs=jobs, bound=plan.bound, packs=[pack.names for pack in packs if len(pack.jobs) > 1])

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Starts what the plan has next on each node. A job never overtakes one that the plan has before it there."""
        if self._plan is None:
            return
        placed = self._plan.jobs
        waiting = [
            job for job in self._open_jobs() if job.name in placed and job.state in (JobState.WAITING, JobState.MOVING)
        ]
        waiting.sort(key=lambda job: (placed[job.name].start, job.name))
        blocked = set()
        for job in waiting:
            option, node = placed[job.name].option, self._nodes.get(placed[job.name].node)
            if node is None or node.name in blocked or job.state is JobState.RUNNING:
                continue
            free, needed = self._free_devices(node, job), job.options[option].devices
            if job.state is JobState.MOVING or len(free) < needed:
                blocked.add(node.name)
                continue
            pack = next((names for names in self._plan.packs if job.name in names), ())
            beside = [each for each in waiting if each is not job and each.name in pack and may_share(each)]
            self._start([job, *(beside if may_share(job) else ())], node, tuple(free[:needed]))

    def _free_devices(self, node: Node, job: JobRecord) -> list[int]:
        """Those of a node; behind the others the ones where the job has failed last."""
        taken = {
            device
            for each in self._running.values()
            if each.running is not None and each.running.node == node.name
            for device in each.running.devices
        }
        avoided = job.last_devices[1] if job.last_devices is not None and job.last_devices[0] == node.name else ()
        free = [device for device in range(len(node.devices)) if device not in taken]
        return sorted(free, key=lambda device: (device in avoided, device))

    def _start(self, jobs: Sequence[JobRecord], node: Node, devices: tuple[int, ...]) -> None:
        """Starts a job, and those that share the device with it."""
        chosen = [job.options[self._option(job)] for job in jobs]
        factors = slowdowns(chosen)
        orders = [self._order(job, option, node, devices) for job, option in zip(jobs, chosen, strict=True)]
        now = self._cluster.now()
        for job, option, order, factor in zip(jobs, chosen, orders, factors, strict=True):
            number = self._option(job)
            job.state = JobState.RUNNING
            job.running = Running(order.gang, number, node.name, devices, orders[0].gang, now)
            job.seconds[number] *= factor
            self._running[order.gang] = job
            self._record(
                "start",
                job=job.name,
                gang=order.gang,
                at=now,
                option=number,
                technique=option.name,
                node=node.name,
                devices=list(devices),
            )
        self._cluster.start(orders, node.name, devices)

    def _option(self, job: JobRecord) -> int:
        """Of a job that waits: the one in the plan."""
        return 0 if self._plan is None else self._plan.jobs[job.name].option

    def _order(self, job: JobRecord, option: Option, node: Node, devices: Sequence[int]) -> Order:
        return Order(
            gang=next(self._gangs),
            task=Task.TRAIN,
            job=job.job,
            folder=job.folder,
            devices=[node.devices[device].describe() for device in devices],
            settings=self._settings,
            technique=option.technique,
            configuration=option.configuration,
        )

    def _too_large(self) -> StateError:
        job = self._open_jobs()[0]
        most = max((len(node.devices) for node in self._nodes.values()), default=0)
        return StateError(
            f"job {job.name!r} needs {_least_devices(job)} devices of one node, and the largest node that is left has "
            f"{most}: call resume() when there are more"
        )

    # ---- hearing ----------------------------------------------------------------------------------------------------

    def _seconds_to_wait(self) -> float:
        """Until the next plan is due, or a job may hang."""
        moments = [self._agenda.next, self._cluster.now() + self._desk.every]
        moments += [self._limit(job) for job in self._running.values()]
        return max(0.0, min(moments) - self._cluster.now())

    def _limit(self, job: JobRecord) -> float:
        """The moment from which on a gang counts as hanging; never if it was killed already."""
        running = job.running
        if running is None or running.verdict:
            return float("inf")
        inside = self._in(running)
        heard = running.heard
        if is_common(_option_of(job)):  # while one of them saves or evaluates, the others make no step
            heard = max(each.running.heard for each in inside if each.running is not None)
        if all(each.running is None or each.running.stepped for each in inside):
            return heard + self._settings.patience
        opening = max(_OPEN, sum(_option_of(each).open_s for each in inside))  # one may wait for the other
        return heard + self._settings.patience + opening

    def _in(self, running: Running) -> list[JobRecord]:
        """The jobs in a process."""
        jobs = self._running.values()
        return [job for job in jobs if job.running is not None and job.running.process == running.process]

    def _look_for_hanging(self) -> None:
        now = self._cluster.now()
        for gang, job in self._running.items():
            if job.running is not None and now >= self._limit(job):
                logger.warning("job %s has made no step for %g s and is restarted", job.name, self._settings.patience)
                job.running.verdict = f"it made no step for {self._settings.patience:g} s"
                self._cluster.kill(gang)

    def _hear(self, event: Event) -> None:
        job = self._running.get(event.gang)
        if job is None or job.running is None:
            return
        if isinstance(event, Progress):
            self._hear_progress(job, job.running, event.record)
        else:
            self._hear_end(job, job.running, event.failure)

    def _hear_progress(self, job: JobRecord, running: Running, record: Mapping[str, Any]) -> None:
        running.heard, running.opened = self._cluster.now(), True
        happened, step = record["event"], int(record["step"])
        made, job.step = step - job.step, step
        if happened == "step":
            if running.stepped or made > 1:  # the first one takes longer
                known = job.seconds[running.option]
                weight = 1 - (1 - _WEIGHT) ** max(1, made)
                job.seconds[running.option] = known + weight * (float(record["seconds"]) - known)
            running.stepped = True
        elif happened in ("opened", "saved"):  # what is opened was saved, even if its gang was killed before it told so
            if step > job.saved:
                job.failures.clear()
            job.saved = step
        elif happened == "done":
            job.state = JobState.DONE
            job.evaluation = record.get("evaluation")
        if self._desk.hear(job.name, record) and job.state is not JobState.DONE:
            self._stop(job)

    def _hear_end(self, job: JobRecord, running: Running, failure: Failure | None) -> None:
        sharing, now = self._in(running), self._cluster.now()
        _scale(sharing, [1 / factor for factor in slowdowns(list(map(_option_of, sharing)))])
        others = [each for each in sharing if each is not job]
        _scale(others, slowdowns(list(map(_option_of, others))))
        job.running = None
        del self._running[running.gang]
        if failure is not None and running.verdict:
            failure = replace(failure, message=running.verdict)
        elif failure is None and job.state is JobState.RUNNING:
            failure = Failure(message="it ended before its last step, and was not asked to")
        self._record(
            "end",
            job=job.name,
            gang=running.gang,
            at=now,
            step=job.step,
            state=job.state.value,
            failure=None if failure is None else failure.message,
            wont_do=failure is not None and failure.wont_do,
        )
        if not self._is_as_planned(job, now):
            self._agenda.hurry(now)
        if failure is not None and job.state is not JobState.DONE:
            job.step = job.saved
        if job.state in (JobState.DONE, JobState.STOPPING):
            self._end(job, JobState.DONE if job.state is JobState.DONE else JobState.STOPPED)
            return
        job.state = JobState.WAITING
        if failure is not None:
            self._agenda.hurry(now)
            self._hear_failure(job, running, failure)

    def _hear_failure(self, job: JobRecord, running: Running, failure: Failure) -> None:
        logger.warning("job %s has failed: %s", job.name, failure.message)
        job.last_devices = running.node, running.devices
        if failure.is_lost and running.node not in {node.name for node in self._cluster.nodes()}:
            return  # no fault of the job
        if failure.is_blameless:
            return  # the other one's failures are counted
        if failure.wont_do and len(job.options) > 1:
            job.options = [option for number, option in enumerate(job.options) if number != running.option]
            job.seconds = [seconds for number, seconds in enumerate(job.seconds) if number != running.option]
            self._plan = None  # it has options by their numbers
            return
        job.failures.append(failure.message)
        if len(job.failures) >= MOST_FAILURES:
            self._record("set aside", job=job.name, failures=job.failures, trace=failure.trace)
            self._end(job, JobState.SET_ASIDE)

    def _is_as_planned(self, job: JobRecord, now: float) -> bool:
        """Whether a job has ended about when the plan says, and others wait for its devices: the plan still holds."""
        if self._plan is None or job.name not in self._plan.jobs:
            return False
        if job.state is JobState.MOVING:
            return True
        late = now - self._agenda.made - self._plan.jobs[job.name].end
        is_on_time = abs(late) <= _AS_PLANNED * max(self._plan.makespan, SHORTEST)
        return is_on_time and any(each.state is JobState.WAITING for each in self._jobs.values())


def _scale(jobs: Sequence[JobRecord], factors: Sequence[float]) -> None:
    """A step of running jobs takes so many times as long as it did."""
    for job, factor in zip(jobs, factors, strict=True):
        job.seconds[0 if job.running is None else job.running.option] *= factor


def _option_of(job: JobRecord) -> Option:
    """The option that a job runs with."""
    return job.options[0 if job.running is None else job.running.option]


def _least_devices(job: JobRecord) -> int:
    return min(option.devices for option in job.options)


def _of_packs(plan: FleetPlan, packs: Sequence[Pack], seconds: float) -> FleetPlan:
    """A plan of jobs as one of packs, with its times counted from a later moment. Packs that are new are not in it."""
    found = {}
    for pack in packs:
        placed = plan.jobs.get(pack.names[0])
        if placed is not None and (not pack.options or pack.names in plan.packs):
            option = 0 if pack.options else placed.option
            moved = replace(placed, option=option, start=placed.start - seconds, end=placed.end - seconds)
            found[pack.work.name] = moved
    return FleetPlan(jobs=found, bound=plan.bound)
