"""Runs jobs by a plan, and plans again: when a job ends or fails, when nodes come or go, and at intervals.

It knows neither processes nor clocks: a :class:`~hydra_ext.fleet.cluster.Cluster` has them, which may be simulated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra_ext.errors import StateError
from hydra_ext.fleet.cluster.interface import Cluster, Event, Failure, Node, Order, Progress, Task
from hydra_ext.fleet.scheduling.planning import Choice, FleetPlan, Work, make_plan
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.scheduling.trials import Option

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # of a job in a row, without a new checkpoint in between
_OPEN = 5.0  # seconds to add to the patience for a gang's first step: processes start, models are built
_WEIGHT = 0.2  # of a new step in the mean of a job's seconds a step


class JobState(str, Enum):
    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"  # saves and ends, to go on with another option
    DONE = "done"
    SET_ASIDE = "set aside"  # failed too often


ENDED = (JobState.DONE, JobState.SET_ASIDE)


@dataclass
class Running:
    """A job's gang.

    Attributes:
        heard: When it has last told something.
        stepped: Whether it has made a step.
    """

    gang: int
    option: int
    node: str
    devices: tuple[int, ...]
    started: float
    heard: float
    stepped: bool = False


@dataclass
class JobRecord:
    """What the fleet knows of a job.

    Attributes:
        job: As :meth:`hydra_ext.fleet.Job.describe` gives it.
        options: Ways to run it.
        folder: Of its checkpoints and progress.
        step: Steps made, as far as is known.
        saved: Steps of the newest checkpoint.
        seconds: Of a step with each option, by what was seen in trials and since.
        failures: Messages of failures since the checkpoint before.
        evaluation: The result of ``evaluate``.
        last_devices: Where its last gang has failed; None if it has not.
    """

    job: Mapping[str, Any]
    options: Sequence[Option]
    folder: str
    state: JobState = JobState.WAITING
    step: int = 0
    saved: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    evaluation: float | None = None
    running: Running | None = None
    last_devices: tuple[str, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        self.seconds = [option.step_s for option in self.options]

    @property
    def name(self) -> str:
        return str(self.job["name"])

    def work(self) -> Work:
        """The job for the planner: what is left of it."""
        left = int(self.job["steps"]) - self.step
        current = self.running if self.state is JobState.RUNNING else None
        choices = []
        for number, option in enumerate(self.options):
            seconds = left * self.seconds[number] + option.save_s
            if current is None or current.option != number:
                seconds += option.open_s
            elif not current.stepped:
                seconds += option.open_s / 2
            if current is not None and current.option != number:
                seconds += self.options[current.option].save_s
            choices.append(Choice(devices=option.devices, seconds=max(seconds, 1e-6)))
        return Work(
            name=self.name,
            choices=choices,
            option=None if current is None else current.option,
            node="" if current is None else current.node,
        )


class Scheduler:
    """
    Args:
        record: Called with each decision and its details, for the journal.
        listen: Called with a job's name and each record of its progress.
    """

    def __init__(
        self,
        cluster: Cluster,
        jobs: Sequence[JobRecord],
        settings: Settings,
        *,
        gangs: Iterator[int],
        record: Callable[..., None],
        listen: Callable[[str, Mapping[str, Any]], None] = lambda job, record: None,
    ) -> None:
        self._cluster = cluster
        self._jobs = {job.name: job for job in jobs}
        self._settings = settings
        self._gangs = gangs
        self._record = record
        self._listen = listen
        self._plan: FleetPlan | None = None
        self._nodes: dict[str, Node] = {}
        self._planned_at = 0.0
        self.plans = 0

    def run(self) -> None:
        """Runs all jobs until each is done or set aside.

        Raises:
            StateError: Jobs are left and no node has the devices for them.
        """
        self._look_at_nodes()
        while self._open_jobs():
            if self._plan is None or self._cluster.now() >= self._planned_at + self._settings.interval:
                self._make_plan()
            self._dispatch()
            for event in self._cluster.wait(self._seconds_to_wait()):
                self._hear(event)
            self._look_for_hanging()
            self._look_at_nodes()

    # ---- planning ---------------------------------------------------------------------------------------------------

    def _open_jobs(self) -> list[JobRecord]:
        return [job for job in self._jobs.values() if job.state not in ENDED]

    def _look_at_nodes(self) -> None:
        there = {node.name: node for node in self._cluster.nodes()}
        if there.keys() != self._nodes.keys():
            self._nodes = there
            self._plan = None

    def _make_plan(self) -> None:
        planned = [job for job in self._open_jobs() if job.state is not JobState.MOVING]
        sizes = {name: len(node.devices) for name, node in self._nodes.items()}
        most = max(sizes.values(), default=0)
        for job in planned:
            if not any(option.devices <= most for option in job.options):
                raise StateError(
                    f"job {job.name!r} needs {min(option.devices for option in job.options)} devices of one node, and "
                    f"the largest node that is left has {most}: call resume() when there are more"
                )
        works = [job.work() for job in planned]
        self._planned_at = self._cluster.now()
        moving = {job.name for job in self._jobs.values() if job.state is JobState.MOVING}
        if not works:
            self._plan = FleetPlan(jobs={})
            return
        self._plan = make_plan(works, sizes, seed=0, before=None if moving else self._plan)
        self.plans += 1
        self._record(
            "plan",
            at=self._planned_at,
            makespan=self._plan.makespan,
            bound=self._plan.bound,
            jobs={name: [each.option, each.node, each.start, each.end] for name, each in self._plan.jobs.items()},
        )
        for job in planned:
            if job.running is not None and self._plan.jobs[job.name].option != job.running.option:
                job.state = JobState.MOVING
                self._record("move", job=job.name, at=self._planned_at, option=self._plan.jobs[job.name].option)
                self._cluster.stop(job.running.gang)

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Starts what the plan has next on each node. A job never overtakes one that the plan has before it there."""
        if self._plan is None:
            return
        waiting = [job for job in self._open_jobs() if job.state is JobState.WAITING and job.name in self._plan.jobs]
        waiting.sort(key=lambda job: (self._placed(job).start, job.name))
        for name, node in self._nodes.items():
            for job in waiting:
                placed = self._placed(job)
                if placed.node != name:
                    continue
                free = self._free_devices(node, job)
                if len(free) < job.options[placed.option].devices:
                    break
                self._start(job, placed.option, node, tuple(free[: job.options[placed.option].devices]))

    def _placed(self, job: JobRecord) -> Any:
        return self._plan.jobs[job.name] if self._plan is not None else None

    def _free_devices(self, node: Node, job: JobRecord) -> list[int]:
        """Those of a node, where the job has failed last."""
        taken = {
            device
            for each in self._jobs.values()
            if each.running is not None and each.running.node == node.name
            for device in each.running.devices
        }
        avoided = job.last_devices[1] if job.last_devices is not None and job.last_devices[0] == node.name else ()
        free = [device for device in range(len(node.devices)) if device not in taken]
        return sorted(free, key=lambda device: (device in avoided, device))

    def _start(self, job: JobRecord, option: int, node: Node, devices: tuple[int, ...]) -> None:
        chosen, now = job.options[option], self._cluster.now()
        order = Order(
            gang=next(self._gangs),
            task=Task.TRAIN,
            job=job.job,
            folder=job.folder,
            devices=[node.devices[device].describe() for device in devices],
            technique=chosen.technique,
            configuration=chosen.configuration,
            save_every=self._settings.interval,
            threads=self._settings.threads,
            path=self._settings.path,
        )
        job.state = JobState.RUNNING
        job.running = Running(order.gang, option, node.name, devices, started=now, heard=now)
        self._record(
            "start",
            job=job.name,
            gang=order.gang,
            at=now,
            option=option,
            technique=chosen.name,
            node=node.name,
            devices=list(devices),
        )
        self._cluster.start(order, node.name, devices)

    # ---- hearing ----------------------------------------------------------------------------------------------------

    def _seconds_to_wait(self) -> float:
        """Until the next plan is due, or a job may hang."""
        now = self._cluster.now()
        moments = [self._planned_at + self._settings.interval]
        moments += [self._limit(job.running) for job in self._jobs.values() if job.running is not None]
        return max(0.0, min(moments) - now)

    def _limit(self, running: Running) -> float:
        return running.heard + self._settings.patience + (0.0 if running.stepped else _OPEN)

    def _look_for_hanging(self) -> None:
        now = self._cluster.now()
        for job in self._jobs.values():
            if job.running is not None and now > self._limit(job.running):
                logger.warning("job %s has made no step for %g s and is restarted", job.name, self._settings.patience)
                job.running.heard = now  # so that it is not killed again before its end is told
                job.failures.append(f"it made no step for {self._settings.patience:g} s")
                self._cluster.kill(job.running.gang)

    def _hear(self, event: Event) -> None:
        job = next(
            (each for each in self._jobs.values() if each.running is not None and each.running.gang == event.gang), None
        )
        if job is None or job.running is None:
            return
        if isinstance(event, Progress):
            self._hear_progress(job, job.running, event.record)
        else:
            self._hear_end(job, job.running, event.failure)

    def _hear_progress(self, job: JobRecord, running: Running, record: Mapping[str, Any]) -> None:
        running.heard = self._cluster.now()
        self._listen(job.name, record)
        happened, step = record["event"], int(record["step"])
        job.step = step
        if happened == "step":
            if running.stepped:  # the first one takes longer
                known = job.seconds[running.option]
                job.seconds[running.option] = known + _WEIGHT * (float(record["seconds"]) - known)
            running.stepped = True
        elif happened == "saved":
            if step > job.saved:
                job.failures.clear()
            job.saved = step
        elif happened == "done":
            job.state = JobState.DONE
            job.evaluation = record.get("evaluation")

    def _hear_end(self, job: JobRecord, running: Running, failure: Failure | None) -> None:
        job.running = None
        now = self._cluster.now()
        self._record(
            "end",
            job=job.name,
            gang=running.gang,
            at=now,
            step=job.step,
            state=job.state.value,
            failure=None if failure is None else failure.message,
        )
        self._plan = self._plan if self._is_as_planned(job, now) else None
        if job.state is JobState.DONE:
            return
        job.step = job.saved if failure is not None else job.step
        job.state = JobState.WAITING
        if failure is not None:
            self._hear_failure(job, running, failure)

    def _hear_failure(self, job: JobRecord, running: Running, failure: Failure) -> None:
        logger.warning("job %s has failed: %s", job.name, failure.message)
        job.last_devices = running.node, running.devices
        if not (failure.is_lost and job.failures and job.failures[-1].startswith("it made no step")):
            job.failures.append(failure.message)
        if failure.wont_do and len(job.options) > 1:
            job.options = [option for number, option in enumerate(job.options) if number != running.option]
            job.seconds = [seconds for number, seconds in enumerate(job.seconds) if number != running.option]
            self._plan = None
        if len(job.failures) >= MOST_FAILURES:
            job.state = JobState.SET_ASIDE
            self._record("set aside", job=job.name, failures=job.failures, trace=failure.trace)

    def _is_as_planned(self, job: JobRecord, now: float) -> bool:
        """Whether a job has ended about when the plan says, so that the plan still holds."""
        if job.state is not JobState.DONE or self._plan is None or job.name not in self._plan.jobs:
            return False
        late = now - self._planned_at - self._plan.jobs[job.name].end
        return abs(late) <= 0.05 * max(self._plan.makespan, 1e-9) or not any(
            each.state is JobState.WAITING for each in self._jobs.values()
        )
