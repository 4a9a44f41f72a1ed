"""What a fleet is doing: whether it runs, how far its jobs are, and when they end."""

from __future__ import annotations

import math
import time
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra_ext.fleet import history, journal
from hydra_ext.fleet.cluster.embedded import LOCK, is_locked
from hydra_ext.fleet.cluster.progress import Track
from hydra_ext.fleet.history import FLEET_ENDED, Activity, Foreseen, History, JobHistory, PastPlan
from hydra_ext.fleet.reporting import memory
from hydra_ext.fleet.results import aligned, text_of
from hydra_ext.fleet.scheduling.records import ENDED, JobState

_SLACK = 1e-6  # seconds: starts in a plan are sums of other jobs' seconds
COLUMNS = ("job", "state", "technique", "devices", "steps", "loss", "s/step", "left", "memory", "failures")


class FleetState(str, Enum):
    MEASURING = "measuring"  # trials run; there is no plan yet
    RUNNING = "running"
    STOPPED = "stopped"  # its process has ended, and jobs are left
    FINISHED = "finished"  # all jobs are done, stopped or set aside


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What a job is doing.

    Attributes:
        state: In words.
        technique: What it runs with; for a job that waits, what it is planned to run with; else what it ran with last.
        node: Where it runs; empty if it does not.
        devices: Their numbers on the node.
        step: Steps made; without those since the checkpoint if it does not run.
        steps: Steps to make.
        loss: Of the last step made; None before the first.
        step_seconds: Of a step, by the latest ones; None if the job does not run.
        eta_seconds: Until the job ends: by its own speed, or by the plan if it waits; None if nothing says so.
        memory_bytes: Resident host memory of its processes on this machine; None if there are none. That of a process
            which two jobs share counts for one of them.
        failures: Why its gangs have failed so far.
    """

    name: str
    state: JobState
    technique: str
    node: str
    devices: tuple[int, ...]
    step: int
    steps: int
    loss: float | None
    step_seconds: float | None
    eta_seconds: float | None
    memory_bytes: int | None
    failures: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """The job's row of a table, under :data:`COLUMNS`."""
        return (
            self.name,
            self.state.value,
            self.technique or "-",
            f"{self.node}:{','.join(map(str, self.devices))}" if self.devices else "-",
            f"{self.step}/{self.steps}",
            text_of(self.loss),
            text_of(self.step_seconds),
            duration(self.eta_seconds),
            "-" if self.memory_bytes is None else f"{self.memory_bytes / 2**20:,.0f} MiB",
            str(len(self.failures)),
        )


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """What a fleet is doing. ``str()`` gives a table.

    Attributes:
        state: In words.
        seconds: Since its beginning, without the times when it did not run.
        eta_seconds: Until all jobs have ended, by the newest plan; None if it does not run, or has no plan yet.
        jobs: In the order in which they were given.
    """

    folder: str
    state: FleetState
    seconds: float
    eta_seconds: float | None
    jobs: tuple[JobStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON. A loss that is no finite number is a text."""
        found = asdict(self) | {"state": self.state.value}
        for job in found["jobs"]:
            job["state"] = job["state"].value
            if job["loss"] is not None and not math.isfinite(job["loss"]):
                job["loss"] = str(job["loss"])
        return found

    def summary(self) -> str:
        """The fleet in one line."""
        ended = sum(job.state in ENDED for job in self.jobs)
        what = {
            FleetState.MEASURING: "measures what its jobs can run with",
            FleetState.RUNNING: f"runs, about {duration(self.eta_seconds)} left",
            FleetState.STOPPED: "does not run: its process has ended before its jobs. Fleet(folder).resume() goes on",
            FleetState.FINISHED: "has finished",
        }
        return (
            f"{self.folder}: {ended} of {len(self.jobs)} jobs have ended after {duration(self.seconds)}; "
            f"the fleet {what[self.state]}"
        )

    def notes(self) -> list[str]:
        """The latest failure of each job that has failed."""
        return [f"{job.name}: {job.failures[-1].splitlines()[0]}" for job in self.jobs if job.failures]

    def __str__(self) -> str:
        table = aligned([COLUMNS, *(job.cells() for job in self.jobs)])
        return "\n".join([self.summary(), table, *self.notes()])


def read(folder: Path, *, tracks: MutableMapping[str, Track] | None = None) -> FleetStatus:
    """What the fleet in a folder is doing. Only files are read: it may run in any process, or not at all.

    Args:
        tracks: By job, what an earlier call has read: it is read on.

    Raises:
        JournalError: The folder holds no fleet, or its journal is damaged.
    """
    runs = is_running(folder)
    return of(history.load(folder, now=time.time() if runs else None, tracks=tracks), folder, runs=runs)


def is_running(folder: Path) -> bool:
    """Whether the process of a fleet lives, or its workers on this machine."""
    return is_locked(folder / LOCK) or is_locked(folder / journal.NAME)


def of(past: History, folder: Path, *, runs: bool) -> FleetStatus:
    """
    Args:
        runs: Whether the fleet's process, or its workers, live.
    """
    if past.is_finished:
        state = FleetState.FINISHED
    elif not runs:
        state = FleetState.STOPPED
    else:
        state = FleetState.RUNNING if past.plans else FleetState.MEASURING
    plan = past.plans[-1] if state is FleetState.RUNNING else None
    etas = {} if plan is None else _etas(past, plan)
    jobs = tuple(_job(past, name, None if plan is None else plan.jobs.get(name), etas.get(name)) for name in past.jobs)
    eta = None if plan is None else max(0.0, plan.end - past.seconds, *etas.values())
    return FleetStatus(folder=str(folder), state=state, seconds=past.seconds, eta_seconds=eta, jobs=jobs)


def _job(past: History, name: str, foreseen: Foreseen | None, eta: float | None) -> JobStatus:
    job = past.jobs[name]
    track, last = job.track, job.stretches[-1] if job.stretches else None
    running = last if job.activity is not None else None
    step = track.step if running is not None or job.is_done else track.saved
    return JobStatus(
        name=name,
        state=_state(job),
        technique=_technique(job, foreseen),
        node="" if running is None else running.node,
        devices=() if running is None else running.devices,
        step=step,
        steps=int(job.job["steps"]),
        loss=track.losses.get(step),
        step_seconds=_step_seconds(past, name) if job.activity is not None else None,
        eta_seconds=eta,
        memory_bytes=None if running is None else memory.resident_bytes(job.folder / "log.txt"),
        failures=tuple(each.failure for each in job.stretches if each.failure and each.failure != FLEET_ENDED),
    )


def _state(job: JobHistory) -> JobState:
    if job.is_done:
        return JobState.DONE
    if job.failures:
        return JobState.SET_ASIDE
    if job.is_stopped:
        return JobState.STOPPED if job.activity is None else JobState.STOPPING
    if job.activity is not None:
        return JobState.MOVING if job.activity is Activity.MOVING else JobState.RUNNING
    return JobState.WAITING


def _technique(job: JobHistory, foreseen: Foreseen | None) -> str:
    if job.stretches and (job.activity is not None or not job.is_open or foreseen is None):
        return job.stretches[-1].technique
    return "" if foreseen is None else foreseen.technique


def _step_seconds(past: History, name: str) -> float | None:
    """Of a job that runs: by its latest steps, or by the trial before there are two."""
    job = past.jobs[name]
    if job.track.seconds:
        return sum(job.track.seconds) / len(job.track.seconds)
    measured, stretch = past.measured_of(name), job.stretches[-1]
    for option in () if measured is None else measured.options:
        if (option.name, option.devices) == (stretch.technique, len(stretch.devices)):
            return option.step_s
    return None


def _etas(past: History, plan: PastPlan) -> dict[str, float]:
    """Seconds until each job ends that has not ended: by its own speed, and by the plan for those that wait.

    Jobs that wait are as late as those that the plan has before them on their node.
    """
    etas, late = {}, []
    for name, job in past.jobs.items():
        seconds = _step_seconds(past, name) if _state(job) is JobState.RUNNING else None
        if seconds is not None:
            etas[name] = (int(job.job["steps"]) - job.track.step) * seconds
            if name in plan.jobs:
                late.append((plan.jobs[name], past.seconds + etas[name] - plan.jobs[name].end))
    for name, job in past.jobs.items():
        if name in plan.jobs and name not in etas and _state(job) not in ENDED:
            own = plan.jobs[name]
            delays = [delay for other, delay in late if other.node == own.node and other.end <= own.start + _SLACK]
            end = own.end + max([0.0, *delays])
            etas[name] = max(end - past.seconds, own.end - own.start)
    return etas


def duration(seconds: float | None) -> str:
    """Seconds for people, such as ``1 h 05 min``; ``-`` for None."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"
