"""What a fleet's journal and its jobs' progress files say of the past. All that shows the past reads it here."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra_ext.errors import JournalError
from hydra_ext.fleet import journal
from hydra_ext.fleet.cluster.progress import Track
from hydra_ext.fleet.cluster.training import CHECKPOINTS
from hydra_ext.fleet.results import JobResult, Outcome, Results, Stretch
from hydra_ext.fleet.scheduling.trials import Measured, is_of_kind

FLEET_ENDED = "the fleet's process had ended"


@dataclass(frozen=True, kw_only=True)
class Move:
    """A job was asked to save and to go on in another way.

    Attributes:
        at: Seconds from the fleet's beginning.
        technique: What it goes on with.
        devices: Number of devices that it goes on with.
    """

    at: float
    technique: str
    devices: int


class Activity(Enum):
    """What a job does that has devices."""

    RUNNING = "trains"
    MOVING = "saves, to go on with another option"


@dataclass
class JobHistory:
    """One job's past.

    Attributes:
        job: As :meth:`hydra_ext.fleet.Job.describe` gives it.
        folder: Of its checkpoints and progress.
        track: What its progress file says.
        stretches: In order. The last one is not over if the job runs at this moment.
        moves: In order.
        failures: Why it was set aside; empty if it was not.
        activity: What it does with devices; None if it has none at this moment.
        is_stopped: Whether it was stopped, and not restarted.
    """

    job: Mapping[str, Any]
    folder: Path
    track: Track
    stretches: list[Stretch] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    failures: tuple[str, ...] = ()
    activity: Activity | None = None
    is_stopped: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        return not (self.is_done or self.is_stopped or self.failures)

    @property
    def outcome(self) -> Outcome:
        if self.is_done:
            return Outcome.DONE
        if self.failures:
            return Outcome.SET_ASIDE
        return Outcome.STOPPED if self.is_stopped else Outcome.OPEN

    @property
    def step(self) -> int:
        """Steps of the newest checkpoint."""
        return self.track.saved

    @property
    def is_done(self) -> bool:
        """Whether it has made all its steps."""
        return self.track.is_done


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A job in a plan. Times are seconds from the fleet's beginning.

    Attributes:
        devices: Number of devices of the node.
    """

    technique: str
    devices: int
    node: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class PastPlan:
    """A plan that the fleet has followed. Times are seconds from the fleet's beginning.

    Attributes:
        at: When it was made.
        end: When its last job ends.
        jobs: By name: those that had not ended.
        packs: Names of jobs that share a device.
    """

    at: float
    end: float
    jobs: Mapping[str, Foreseen]
    packs: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, kw_only=True)
class History:
    """A fleet's past.

    Attributes:
        jobs: By name.
        measured: What trials have measured, by kind of job.
        plans: In order.
        devices: Number of the fleet's devices.
        seconds: From its beginning to now, or to its newest sign, without the times when it did not run.
        next_gang: A number that no gang has had.
        threads: Of torch on the CPU, in each process; None before it has begun.
        is_finished: Whether all jobs have ended.
    """

    jobs: Mapping[str, JobHistory]
    measured: Mapping[str, Measured]
    plans: Sequence[PastPlan]
    devices: int
    seconds: float
    next_gang: int
    threads: int | None
    is_finished: bool

    def measured_of(self, name: str) -> Measured | None:
        """What trials have measured for a job; None if they have not ended."""
        job = self.jobs[name].job
        return next((found for kind, found in self.measured.items() if is_of_kind(job, kind)), None)


def load(folder: Path, *, now: float | None = None, tracks: MutableMapping[str, Track] | None = None) -> History:
    """The past of the fleet in a folder, which may be running.

    Args:
        now: As for :func:`read`.
        tracks: As for :func:`read`.

    Raises:
        JournalError: The folder holds no fleet, or its journal is damaged.
    """
    entries = journal.read_only(folder)
    if not entries or entries[0]["event"] != "fleet":
        raise JournalError(f"{folder} holds no fleet: its journal does not begin with one", file=folder / journal.NAME)
    return read(folder, entries, now=now, tracks=tracks)


def read(
    folder: Path,
    entries: Sequence[Mapping[str, Any]],
    *,
    now: float | None = None,
    tracks: MutableMapping[str, Track] | None = None,
) -> History:
    """
    Args:
        entries: Of the journal; the first one is that of the fleet.
        now: The wall clock's time if the fleet runs at this moment: stretches that are not over reach until now.
        tracks: By job, what an earlier call has read: it is read on.
    """
    reading = _Reading(folder, entries[0], {} if tracks is None else tracks)
    for entry in entries:
        reading.hear(entry)
    is_finished = entries[-1]["event"] == "finished"
    return reading.history(None if is_finished else now, is_finished=is_finished)


class _Reading:
    """What the entries so far say."""

    def __init__(self, folder: Path, first: Mapping[str, Any], tracks: MutableMapping[str, Track]) -> None:
        self._jobs: dict[str, JobHistory] = {}
        self._folder = folder
        self._tracks = tracks
        for job in first["jobs"]:
            self._add(job)
        self._devices = len(first["devices"])
        self._measured: dict[str, Measured] = {}
        self._plans: list[PastPlan] = []
        self._open: dict[int, Mapping[str, Any]] = {}  # entries of starts, by gang
        self._options: dict[str, list[tuple[str, int]]] = {}  # techniques and devices by job, as plans number them
        self._moments = [(float(first["time"]), 0.0)]  # wall clock, and seconds from the fleet's beginning
        self._gang = 0
        self._threads: int | None = None

    def hear(self, entry: Mapping[str, Any]) -> None:
        if "at" in entry and "time" in entry:
            self._moments.append((float(entry["time"]), float(entry["at"])))
        event = entry["event"]
        if event == "begin":
            self._threads = self._threads or int(entry["threads"])
            self._close_gangs(now=None)
            self._options.clear()
        elif event == "measured":
            self._measured[entry["kind"]] = Measured.of(entry["measured"])
        elif event == "plan":
            self._plans.append(self._plan(entry))
        elif event == "move":
            technique, devices = self._option(entry["job"], entry["option"])
            job = self._jobs[entry["job"]]
            job.moves.append(Move(at=entry["at"], technique=technique, devices=devices))
            job.activity = Activity.MOVING
        elif event == "start":
            self._gang = max(self._gang, int(entry["gang"]))
            self._open[entry["gang"]] = entry
        elif event == "end":
            self._end(entry)
        elif event == "set aside":
            self._jobs[entry["job"]].failures = tuple(entry["failures"])
        elif event == "add":
            self._add(entry["job"])
        elif event in ("stopping", "stopped"):
            self._jobs[entry["job"]].is_stopped = True
        elif event == "restart":
            self._jobs[entry["job"]].is_stopped = False
            self._jobs[entry["job"]].failures = ()
            self._options.pop(entry["job"], None)  # it has all of them again

    def _add(self, job: Mapping[str, Any]) -> None:
        name = job["name"]
        track = self._tracks.setdefault(name, Track(self._folder / name / "progress.jsonl")).read_on()
        self._jobs[name] = JobHistory(job, self._folder / name, track)

    def history(self, now: float | None, *, is_finished: bool) -> History:
        seconds = max(at for _, at in self._moments)
        if now is not None:
            seconds = max(seconds, self._seconds_at(now))
        self._close_gangs(now)
        ends = [stretch.end for job in self._jobs.values() for stretch in job.stretches]
        return History(
            jobs=self._jobs,
            measured=self._measured,
            plans=self._plans,
            devices=self._devices,
            seconds=max(seconds, *ends) if ends else seconds,
            next_gang=self._gang + 1,
            threads=self._threads,
            is_finished=is_finished,
        )

    def _plan(self, entry: Mapping[str, Any]) -> PastPlan:
        at, jobs = float(entry["at"]), {}
        for name, (option, node, start, end) in entry["jobs"].items():
            technique, devices = self._option(name, option)
            jobs[name] = Foreseen(technique=technique, devices=devices, node=node, start=at + start, end=at + end)
        return PastPlan(at=at, end=at + float(entry["makespan"]), jobs=jobs, packs=entry.get("packs", ()))

    def _option(self, name: str, number: int) -> tuple[str, int]:
        """Technique and devices of a job's option. Plans have its number only, among those that are left."""
        if name not in self._options:
            found = next(
                (each for kind, each in self._measured.items() if is_of_kind(self._jobs[name].job, kind)), None
            )
            self._options[name] = [(option.name, option.devices) for option in found.options] if found else []
        options = self._options[name]
        return options[number] if number < len(options) else (f"option {number}", 1)

    def _end(self, entry: Mapping[str, Any]) -> None:
        begun = self._open.pop(entry["gang"])
        job, failure = self._jobs[entry["job"]], entry["failure"]
        job.stretches.append(_stretch(begun, entry["at"], entry["step"], failure))
        job.activity = None
        options = self._options.get(entry["job"], [])
        if entry.get("wont_do") and 1 < len(options) > begun["option"]:
            del options[begun["option"]]  # as the scheduler does

    def _close_gangs(self, now: float | None) -> None:
        """Adds the stretches of gangs that have no end in the journal: they run, or the fleet's process had ended."""
        for gang, begun in self._open.items():
            job, start = self._jobs[begun["job"]], float(begun["at"])
            time, step = job.track.ends.get(gang, (None, job.track.saved))
            if now is not None and not job.is_done:
                job.activity = job.activity or Activity.RUNNING
                job.stretches.append(_stretch(begun, max(start, self._seconds_at(now)), job.track.step, None))
                continue
            end = start if time is None else max(start, self._seconds_at(time))
            is_whole = job.is_done and job.track.gang == gang  # only its processes have not ended
            job.stretches.append(_stretch(begun, end, step, None if is_whole else FLEET_ENDED))
            job.activity = None
        self._open.clear()

    def _seconds_at(self, time: float) -> float:
        """Seconds from the fleet's beginning at a time of the wall clock; it stands where the fleet does not run."""
        before = [moment for moment in self._moments if moment[0] <= time]
        after = [at for moment, at in self._moments if moment > time]
        moment, at = before[-1] if before else self._moments[0]
        return min([at + time - moment, *after])


def _stretch(begun: Mapping[str, Any], end: float, steps: int, failure: str | None) -> Stretch:
    return Stretch(
        technique=begun["technique"],
        node=begun["node"],
        devices=tuple(begun["devices"]),
        start=begun["at"],
        end=end,
        steps=steps,
        failure=failure,
    )


def results(history: History) -> Results:
    """The results so far."""
    found = {}
    for name, job in history.jobs.items():
        found[name] = JobResult(
            name=name,
            outcome=job.outcome,
            losses=job.track.losses,
            evaluation=job.track.evaluation,
            seconds=sum(stretch.end - stretch.start for stretch in job.stretches),
            stretches=tuple(job.stretches),
            failures=job.failures,
            folder=job.folder / CHECKPOINTS,
        )
    return Results(found, seconds=history.seconds, threads=history.threads)
