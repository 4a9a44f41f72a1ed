"""What a fleet's journal and its jobs' progress files say of the past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ext.fleet.cluster.progress import ProgressReader, losses
from hydra_ext.fleet.cluster.training import CHECKPOINTS
from hydra_ext.fleet.results import JobResult, Results, Stretch
from hydra_ext.fleet.scheduling.trials import Measured


@dataclass
class JobHistory:
    """One job's past.

    Attributes:
        job: As :meth:`hydra_ext.fleet.Job.describe` gives it.
        folder: Of its checkpoints and progress.
        stretches: In order.
        step: Steps of the newest checkpoint.
        failures: Why it was set aside; empty if it was not.
        evaluation: The result of ``evaluate``.
        is_done: Whether it has made all its steps.
    """

    job: Mapping[str, Any]
    folder: Path
    stretches: list[Stretch] = field(default_factory=list)
    step: int = 0
    failures: tuple[str, ...] = ()
    evaluation: float | None = None
    is_done: bool = False

    @property
    def progress_file(self) -> Path:
        return self.folder / "progress.jsonl"


@dataclass(frozen=True, kw_only=True)
class History:
    """A fleet's past.

    Attributes:
        jobs: By name.
        measured: What trials have measured, by kind of job.
        plan: The entry of the newest plan; None before the first.
        seconds: From its beginning to the newest entry, without the times when nobody ran it.
        next_gang: A number that no gang has had.
        threads: Of torch on the CPU, in each process; None before it has begun.
        is_finished: Whether all jobs have ended.
    """

    jobs: Mapping[str, JobHistory]
    measured: Mapping[str, Measured]
    plan: Mapping[str, Any] | None
    seconds: float
    next_gang: int
    threads: int | None
    is_finished: bool


def read(folder: Path, entries: Sequence[Mapping[str, Any]]) -> History:
    """
    Args:
        entries: Of the journal; the first one is that of the fleet.
    """
    jobs = {job["name"]: JobHistory(job, folder / job["name"]) for job in entries[0]["jobs"]}
    measured = {entry["kind"]: Measured.of(entry["measured"]) for entry in entries if entry["event"] == "measured"}
    plans = [entry for entry in entries if entry["event"] == "plan"]
    seconds = max((float(entry["at"]) for entry in entries if "at" in entry), default=0.0)
    for job in jobs.values():
        for record in ProgressReader(job.progress_file).read():
            if record["event"] in ("saved", "done"):
                job.step = int(record["step"])
            if record["event"] == "done":
                job.is_done, job.evaluation = True, record.get("evaluation")
    open_: dict[int, Mapping[str, Any]] = {}

    def interrupt(at: float) -> None:
        for begun in open_.values():
            job = jobs[begun["job"]]
            job.stretches.append(_stretch(begun, at, job.step, "the fleet's process had ended"))
        open_.clear()

    for entry in entries:
        if entry["event"] == "start":
            open_[entry["gang"]] = entry
        elif entry["event"] == "end":
            begun = open_.pop(entry["gang"])
            jobs[entry["job"]].stretches.append(_stretch(begun, entry["at"], entry["step"], entry["failure"]))
        elif entry["event"] == "begin":
            interrupt(entry["at"])
        elif entry["event"] == "set aside":
            jobs[entry["job"]].failures = tuple(entry["failures"])
    interrupt(seconds)
    gangs = [int(entry["gang"]) for entry in entries if "gang" in entry]
    return History(
        jobs=jobs,
        measured=measured,
        plan=plans[-1] if plans else None,
        seconds=seconds,
        next_gang=max(gangs, default=0) + 1,
        threads=next((int(entry["threads"]) for entry in entries if entry["event"] == "begin"), None),
        is_finished=entries[-1]["event"] == "finished",
    )


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
            is_done=job.is_done,
            losses=losses(job.progress_file),
            evaluation=job.evaluation,
            seconds=sum(stretch.end - stretch.start for stretch in job.stretches),
            stretches=tuple(job.stretches),
            failures=job.failures,
            folder=job.folder / CHECKPOINTS,
        )
    return Results(found, seconds=history.seconds, threads=history.threads)
