"""``hydra_ext.Fleet``: trains many jobs on few devices."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra_ext.errors import InvalidArgument, InvalidJob, JobDoesNotFit, JournalError, StateError
from hydra_ext.fleet import control, history, references
from hydra_ext.fleet import devices as fleet_devices
from hydra_ext.fleet.cluster import ray_cluster
from hydra_ext.fleet.cluster.embedded import LOCK, EmbeddedCluster
from hydra_ext.fleet.cluster.interface import Cluster
from hydra_ext.fleet.control import Request, Wish
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.driver import Driver
from hydra_ext.fleet.guides import Guide
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.journal import VERSION, Journal, read_only
from hydra_ext.fleet.reporting import page, status
from hydra_ext.fleet.reporting.status import FleetStatus
from hydra_ext.fleet.results import Results
from hydra_ext.fleet.techniques import DEFAULT, technique_named
from hydra_ext.fleet.tracking import Told, Tracker
from hydra_ext.policy import SimulatedDevice


class Fleet:
    """Trains many jobs on the devices of this machine: it chooses how each runs, where and when.

    Every job has a folder of its own in the fleet's, with its checkpoints (``JOB/ckpt``), losses and output. The
    folder's journal has every decision, so that :meth:`resume` goes on after any end of this process.

    Args:
        folder: Of the fleet; made if it is new.
        devices: The devices, such as ``["cuda:0", "cuda:1"]``, or their number. None takes all CUDA devices, or one
            simulated device where there is none.
        address: Of a Ray cluster whose nodes have the devices, such as ``"auto"`` or ``"ray://head:10001"``; see
            ``ray.init``. Then ``devices`` is None for the nodes' GPUs, or a list with one simulated device, of which a
            node has as many as its resource ``hydra_device`` says. All nodes see the folder under the same path.
        budget: Device bytes of a job on each device; ``"auto"`` for nearly all.

    Raises:
        InvalidArgument: An argument is not as given here.
        InvalidBudget: The budget is not a size.
        InvalidDevice: A device does not exist.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        devices: int | Sequence[SimulatedDevice | str] | None = None,
        address: str | None = None,
        budget: int | str = "auto",
    ) -> None:
        self.folder = Path(folder).absolute()
        self._devices = devices
        self._address = address
        self._budget = budget

    def run(
        self,
        jobs: Sequence[Job],
        *,
        interval: float = 1000.0,
        patience: float = 1800.0,
        techniques: Sequence[str] | None = None,
        guide: Guide | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> Results:
        """Runs jobs to their end. A job that fails three times without a new checkpoint in between is set aside.

        Before anything runs, every technique is asked about every job, and those that would do are measured for a few
        steps. Call this below ``if __name__ == "__main__":`` if the program itself defines the jobs' functions.

        Args:
            jobs: With different names.
            interval: Seconds between plans, and between a job's checkpoints.
            patience: Seconds without a step after which a job counts as hanging, and is restarted.
            techniques: Names of techniques, or classes as ``"module:Class"``; by default all but ``"shared offload"``
                and ``"common base"``, under which jobs share a device and a process.
            guide: Stops jobs that fall behind, or proposes further ones, such as
                :class:`hydra_ext.fleet.SuccessiveHalving`; with a guide that proposes jobs ``jobs`` may be empty.
            trackers: Told of every step, such as :class:`hydra_ext.integrations.trackers.TensorBoard`.

        Raises:
            InvalidJob: Two jobs have one name, or a job cannot be built.
            JobDoesNotFit: No technique can train a job. Nothing has run.
            FleetInUse: Another process runs a fleet in the folder.
            InvalidArgument: The folder has a fleet already, or an argument is not as given here.
            StateError: The call is not below ``if __name__ == "__main__":`` in the program that defines the jobs.
        """
        described = _described(jobs, may_be_empty=guide is not None)
        chosen = list(DEFAULT if techniques is None else techniques)
        for place in chosen:
            technique_named(place)
        _check_seconds(interval=interval, patience=patience)
        devices = self._chosen()
        with _journal(self.folder) as journal:
            if journal.entries:
                raise InvalidArgument(
                    f"{self.folder} has a fleet already: call resume() to go on with it, or give another folder"
                )
            journal.write(
                "fleet",
                version=VERSION,
                jobs=described,
                devices=[device.describe() for device in devices],
                techniques=chosen,
                interval=interval,
                patience=patience,
                path=_search_path(),
                time=time.time(),
            )
        return self.resume(guide=guide, trackers=trackers)

    def resume(self, *, guide: Guide | None = None, trackers: Sequence[Tracker] = ()) -> Results:
        """Goes on with the fleet of the folder, from its journal and the jobs' checkpoints, on the same devices.

        Args:
            guide: As for :meth:`run`. It hears of all steps that were made.
            trackers: As for :meth:`run`.

        Raises:
            JournalError: There is no fleet in the folder, or its journal is damaged, or of another version.
            FleetInUse: Another process runs it.
            InvalidJob, JobDoesNotFit: As :meth:`run` raises them, if nothing has run. The folder has no fleet then.
            InvalidArgument: Other devices or another budget were given than the fleet has.
        """
        try:
            return self._go_on(guide, trackers)
        except (InvalidJob, JobDoesNotFit):
            self._forget_if_nothing_ran()
            raise

    def _go_on(self, guide: Guide | None, trackers: Sequence[Tracker]) -> Results:
        if not (self.folder / "journal.jsonl").exists():
            raise JournalError(
                f"{self.folder} has no fleet: start one with run(jobs)", file=self.folder / "journal.jsonl"
            )
        with _journal(self.folder) as journal:
            if not journal.entries or journal.entries[0]["event"] != "fleet":
                raise JournalError(f"{journal.path} does not begin with a fleet", file=journal.path)
            if journal.entries[0].get("version") != VERSION:
                raise JournalError(
                    f"{journal.path} is of version {journal.entries[0].get('version')}, and this is version {VERSION}: "
                    "go on with the hydra_ext that wrote it, or start a new fleet; hydra_ext.load_model reads the "
                    "checkpoints of the jobs",
                    file=journal.path,
                )
            devices = [Device.of(each) for each in journal.entries[0]["devices"]]
            if (self._devices is not None or self._budget != "auto") and self._chosen() != devices:
                raise InvalidArgument(
                    f"the fleet in {self.folder} has other devices or another budget: leave them out to go on with it, "
                    "or start a new fleet in another folder"
                )
            cluster, told = self._cluster(devices), Told(trackers)
            try:
                return Driver(self.folder, journal, cluster, told, guide).run()
            finally:
                cluster.close()
                told.close()

    def _forget_if_nothing_ran(self) -> None:
        """Leaves the folder as it was, so that a fleet with a larger budget, or mended jobs, can begin there."""
        if not any(entry["event"] == "start" for entry in read_only(self.folder)):
            for name in ("journal.jsonl", LOCK):
                (self.folder / name).unlink(missing_ok=True)

    def stop(self, name: str) -> None:
        """Asks a fleet that runs, in whichever process, to stop a job: it saves a checkpoint and gives its devices up.

        Raises:
            InvalidArgument: There is no such job.
            JournalError: There is no fleet in the folder.
        """
        self._ask(Request(wish=Wish.STOP, name=name), name)

    def restart(self, name: str) -> None:
        """Asks for a job that was stopped or set aside to go on from its newest checkpoint.

        Raises:
            InvalidArgument: There is no such job.
            JournalError: There is no fleet in the folder.
        """
        self._ask(Request(wish=Wish.RESTART, name=name), name)

    def add(self, job: Job, *, parent: str | None = None) -> None:
        """Asks for a new job, such as a clone of another one with changes.

        Args:
            parent: A job whose newest checkpoint the new one begins with, if it has one; None for the beginning.

        Raises:
            InvalidArgument: There is a job of its name already, or no such parent.
            JournalError: There is no fleet in the folder.
        """
        if job.name in history.load(self.folder).jobs:
            raise InvalidArgument(f"there is a job {job.name!r} in {self.folder} already: give this one another name")
        self._ask(Request(wish=Wish.ADD, name=job.name, job=job.describe(), parent=parent), parent)

    def _ask(self, request: Request, needed: str | None) -> None:
        jobs = history.load(self.folder).jobs
        if needed is not None and needed not in jobs:
            raise InvalidArgument(f"{self.folder} has no job {needed!r}: there are {', '.join(jobs)}")
        control.ask(self.folder, request)

    def status(self) -> FleetStatus:
        """What the fleet of the folder is doing, in whichever process it runs. ``str()`` gives a table.

        Raises:
            JournalError: There is no fleet in the folder, or its journal is damaged.
        """
        return status.read(self.folder)

    def write_report(self, path: str | os.PathLike[str]) -> None:
        """Writes a page of HTML: what was planned and what happened, losses, results, and what trials have measured.

        Raises:
            JournalError: There is no fleet in the folder, or its journal is damaged.
            TraceFileError: The file cannot be written.
        """
        page.write(self.folder, path)

    def _chosen(self) -> list[Device]:
        """The devices of this machine; on a cluster, one like those of the nodes."""
        if self._address is None:
            return fleet_devices.choose(self._devices, self._budget)
        if self._devices is None:
            return [ray_cluster.probed(self._address, self._budget)]
        return fleet_devices.choose(self._devices, self._budget)[:1]

    def _cluster(self, devices: Sequence[Device]) -> Cluster:
        if self._address is None:
            return EmbeddedCluster(devices, locks=[self.folder / LOCK])
        return ray_cluster.RayCluster(self._address, devices[0])


@contextmanager
def _journal(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder)
    try:
        yield journal
    finally:
        journal.close()


def _check_seconds(**given: float) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InvalidArgument(f"{name}={value!r}: give a positive number of seconds")


def _described(jobs: Sequence[Job], *, may_be_empty: bool) -> list[dict[str, Any]]:
    if references.is_in_worker():
        raise StateError(
            "a worker imports this program for the functions of its jobs, and must not start a fleet by that: call "
            "run() below if __name__ == '__main__':"
        )
    if isinstance(jobs, Job) or not all(isinstance(job, Job) for job in jobs):
        raise InvalidJob("jobs: give a list of hydra_ext.Job")
    if not jobs and not may_be_empty:
        raise InvalidJob("jobs is empty: give one at least")
    names = [job.name for job in jobs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidJob(f"two jobs are named {twice!r}: their folders would be one; give each a name of its own")
    return [job.describe() for job in jobs]


def _search_path() -> list[str]:
    """The folders of this process, absolute: workers may start elsewhere."""
    return [str(Path(each).absolute()) if each else os.getcwd() for each in sys.path]
