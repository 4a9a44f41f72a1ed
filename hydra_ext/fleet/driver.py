"""Carries a fleet through in this process: trials, the scheduler, and what people and guides ask meanwhile."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hydra_ext.checkpoint import choosing
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import CheckpointError, InvalidJob, JobDoesNotFit
from hydra_ext.fleet import control, history
from hydra_ext.fleet.cluster.interface import Cluster
from hydra_ext.fleet.cluster.training import CHECKPOINTS
from hydra_ext.fleet.control import Request, Wish
from hydra_ext.fleet.guides import Guide
from hydra_ext.fleet.journal import Journal
from hydra_ext.fleet.results import Results
from hydra_ext.fleet.scheduling.records import JobRecord, JobState
from hydra_ext.fleet.scheduling.scheduler import Change, Desk, Scheduler
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.scheduling.trials import Trials, kind_of, largest_node
from hydra_ext.fleet.tracking import Told

logger = logging.getLogger(__name__)

_COPIES = 5  # attempts to copy a checkpoint that is removed meanwhile
_LOOK = 0.5  # seconds between looks at requests


class Driver(Desk):
    """
    Args:
        folder: Of the fleet.
        guide: Hears every step, and may propose and stop jobs; None for none.
    """

    every = _LOOK

    def __init__(self, folder: Path, journal: Journal, cluster: Cluster, told: Told, guide: Guide | None) -> None:
        self._folder = folder
        self._journal = journal
        self._cluster = cluster
        self._told = told
        self._guide = guide
        self._past = history.read(folder, journal.entries)
        self._offset = self._past.seconds - cluster.now()
        self._known = dict(self._past.measured)
        self._names = set(self._past.jobs)
        self._unmeasured: list[JobRecord] = []

    def run(self) -> Results:
        """Runs all jobs to their end."""
        past, given = self._past, self._journal.entries[0]
        self._unmeasured = [_record_of(job) for job in past.jobs.values() if job.is_open]
        if self._unmeasured or not past.is_finished or control.is_asked(self._folder):
            settings = Settings(
                interval=given["interval"],
                patience=given["patience"],
                threads=past.threads or threads_of(self._cluster),
                path=given["path"],
            )
            self._record("begin", at=self._cluster.now(), threads=settings.threads)
            self._tell_guide_of_the_past()
            gangs = count(past.next_gang)
            trials = Trials(
                self._cluster, self._folder / "trials", given["techniques"], settings, gangs=gangs, record=self._record
            )
            scheduler = Scheduler(self._cluster, (), settings, gangs=gangs, record=self._record, desk=self)
            scheduler.admit(self._measured_together(trials))
            scheduler.run()
            while self._unmeasured:
                scheduler.admit(self._measured_alone(trials))
                scheduler.run()
            self._record("finished", at=self._cluster.now())
        return history.results(history.load(self._folder))

    # ---- the scheduler's desk ---------------------------------------------------------------------------------------

    @property
    def wants_all_devices(self) -> bool:
        return bool(self._unmeasured)

    def hear(self, job: str, record: Mapping[str, Any]) -> bool:
        self._told.hear(job, record)
        if self._guide is None or record["event"] != "step":
            return False
        return self._guide.stops(job, int(record["step"]), float(record["loss"]))

    def look(self, open_jobs: int) -> Iterator[Change]:
        for request in control.requests(self._folder):
            if request.wish is Wish.STOP:
                yield from self._stop(request.name)
            elif request.wish is Wish.RESTART:
                yield from self._restart(request.name)
            else:
                yield from self._add(request)
        if self._guide is not None:
            for job in self._guide.propose(open_jobs + len(self._unmeasured)):
                yield from self._add(Request(wish=Wish.ADD, name=job.name, job=job.describe()))

    def ended(self, job: str, state: JobState) -> None:
        if state is not JobState.DONE:
            self._told.job_ended(job, is_done=False, evaluation=None)
        if self._guide is not None:
            self._guide.ended(history.results(history.load(self._folder))[job])

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _record(self, event: str, **more: Any) -> None:
        at = {"at": more["at"] + self._offset} if "at" in more else {}
        self._journal.write(event, **{**more, **at}, time=time.time())

    def _tell_guide_of_the_past(self) -> None:
        if self._guide is not None:
            for name, job in self._past.jobs.items():
                for step, loss in sorted(job.track.losses.items()):
                    self._guide.stops(name, step, loss)
            for name, result in history.results(self._past).items():
                if not self._past.jobs[name].is_open:
                    self._guide.ended(result)

    def _restart(self, name: str) -> Iterator[Change]:
        job = history.load(self._folder).jobs.get(name)
        if job is None or job.is_done or job.is_open:
            logger.warning(
                "job %s is not restarted: %s", name, "there is none" if job is None else "it has not stopped"
            )
            return
        self._record("restart", job=name, at=self._cluster.now())
        yield from self._taken_in(_record_of(job))

    def _add(self, request: Request) -> Iterator[Change]:
        if request.job is None or request.name in self._names:
            logger.warning("a job %s is there already: the new one of this name is left out", request.name)
            return
        folder = self._folder / request.name
        self._names.add(request.name)
        step, failure = 0, ""
        try:
            step = 0 if request.parent is None else _inherit(self._folder / request.parent, folder)
        except (CheckpointError, OSError) as error:
            failure = f"the checkpoint of {request.parent} could not be taken over: {error}"
        self._record("add", job=request.job, parent=request.parent, step=step, at=self._cluster.now())
        if failure:
            self._set_aside(request.name, failure)
        else:
            yield from self._taken_in(JobRecord(request.job, (), str(folder), step=step, saved=step))

    def _stop(self, name: str) -> Iterator[Change]:
        waiting = [record for record in self._unmeasured if record.name == name]
        if not waiting:
            yield Change(name=name)
            return
        self._unmeasured = [record for record in self._unmeasured if record.name != name]
        self._record("stopped", job=name, at=self._cluster.now(), step=waiting[0].step)
        self.ended(name, JobState.STOPPED)

    def _set_aside(self, name: str, failure: str) -> None:
        logger.warning("job %s is set aside: %s", name, failure)
        self._record("set aside", job=name, failures=[failure], trace="")
        self.ended(name, JobState.SET_ASIDE)

    def _taken_in(self, record: JobRecord) -> Iterator[Change]:
        """The job, if it is known how it runs; otherwise it waits to be measured."""
        measured = self._known.get(kind_of(record.job, largest_node(self._cluster)))
        if measured is None or not measured.options:
            self._unmeasured.append(record)
            return
        record.take_options(measured.options)
        yield Change(name=record.name, added=record)

    def _measured_together(self, trials: Trials) -> Sequence[JobRecord]:
        """The jobs of the beginning. If one of them fits nowhere, none runs."""
        records, self._unmeasured = self._unmeasured, []
        if records:
            self._learn(records, trials)
        return records

    def _measured_alone(self, trials: Trials) -> Sequence[JobRecord]:
        """Jobs that have come later. One that fits nowhere is set aside, and the others go on."""
        records, self._unmeasured = self._unmeasured, []
        fitting = []
        for record in records:
            try:
                self._learn([record], trials)
                fitting.append(record)
            except (InvalidJob, JobDoesNotFit) as error:
                self._set_aside(record.name, str(error))
        return fitting

    def _learn(self, records: Sequence[JobRecord], trials: Trials) -> None:
        found = trials.measure([record.job for record in records], self._known)
        node = largest_node(self._cluster)
        for record in records:
            self._known[kind_of(record.job, node)] = found[record.name]
            record.take_options(found[record.name].options)


def _record_of(job: history.JobHistory) -> JobRecord:
    return JobRecord(job.job, (), str(job.folder), step=job.step, saved=job.step)


def _inherit(parent: Path, folder: Path) -> int:
    """Copies the newest checkpoint of a job, which may be running, to a new one's folder.

    Returns:
        Its step; 0 without one.

    Raises:
        CheckpointError: It is damaged, or all were removed while they were copied.
        OSError: It could not be copied.
    """
    draft = folder / "copy"
    for _ in range(_COPIES):
        for left in (draft, folder / CHECKPOINTS):  # of an earlier attempt: the job is new
            shutil.rmtree(left, ignore_errors=True)
        with choosing.newest(parent / CHECKPOINTS, Files(), lambda reader: None) as reader:
            if reader is None:
                return 0
            try:
                shutil.copytree(reader.path, draft)
            except (FileNotFoundError, shutil.Error):  # the parent has removed it meanwhile, for a newer one
                continue
            (folder / CHECKPOINTS).mkdir(parents=True)
            draft.rename(folder / CHECKPOINTS / reader.path.name)
            return int(reader.manifest.content["extra"]["step"])
    raise CheckpointError(f"{parent} saves faster than its checkpoints can be copied", file=parent)


def threads_of(cluster: Cluster) -> int:
    """Of torch in each process: all alike, as sums on the CPU depend on their number."""
    return max(1, min(node.cores // len(node.devices) for node in cluster.nodes()))
