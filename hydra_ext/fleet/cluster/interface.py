"""The seam between the fleet and the machines that it runs on: nodes, gangs of processes, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.scheduling.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine. A gang has all its ranks on one node.

    Attributes:
        name: Unlike those of other nodes, and the same when a fleet resumes.
        devices: In order; a gang gets some of them.
        cores: Of the CPU.
    """

    name: str
    devices: tuple[Device, ...]
    cores: int = 1


class Task(str, Enum):
    """What the processes of a gang do."""

    SEARCH = "search"  # asks techniques what they would do
    TRIAL = "trial"  # measures a few steps, in a folder of its own
    TRAIN = "train"  # trains the job on from its newest checkpoint


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one gang is to do, as JSON.

    Attributes:
        gang: Number of the gang, unlike those of all others of the fleet.
        task: What to do.
        job: The job, as :meth:`Job.describe` gives it.
        folder: Folder of the job, or of the trial, which all nodes see.
        devices: Descriptions of the devices, one for each rank.
        settings: How the fleet runs.
        technique: Place of its class; empty for a search.
        configuration: What the technique has chosen. For a search: under "asked", places of techniques, each with the
            number of devices that it might get.
    """

    gang: int
    task: Task
    job: Mapping[str, Any]
    folder: str
    devices: Sequence[Mapping[str, Any]]
    settings: Settings
    technique: str = ""
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(described: Mapping[str, Any]) -> Order:
        return Order(**{**described, "task": Task(described["task"]), "settings": Settings(**described["settings"])})

    @property
    def progress_file(self) -> Path:
        return Path(self.folder) / "progress.jsonl"

    @property
    def result_file(self) -> Path:
        """Where a search or a trial leaves its result; a job that shares its process, what would be its exit status."""
        return Path(self.folder) / f"gang-{self.gang}.result.json"

    @property
    def stop_file(self) -> Path:
        """It asks a job that shares its process to save and end."""
        return Path(self.folder) / f"gang-{self.gang}.stop"

    def error_file(self, rank: int) -> Path:
        return Path(self.folder) / f"gang-{self.gang}.rank-{rank}.error.json"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a gang did not do what it was to do.

    Attributes:
        message: For people.
        trace: The Python traceback; empty without one.
        wont_do: Whether the technique has said that it cannot train the job.
        smallest_budget: The budget with which it could; None if it did not say.
        is_lost: Whether the process or its node went away, which is no fault of the job.
        is_blameless: Whether another job of its process is to blame.
    """

    message: str
    trace: str = ""
    wont_do: bool = False
    smallest_budget: int | None = None
    is_lost: bool = False
    is_blameless: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A record of a job's progress file, as :class:`hydra_ext.fleet.cluster.progress.Record` writes it."""

    gang: int
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """All processes of a gang have ended, and its devices are free.

    One that shares its device has left its process. The device is free when the last one ends.
    """

    gang: int
    failure: Failure | None


Event = Progress | Ended


class Cluster(Protocol):
    """Starts gangs on nodes, and tells what becomes of them."""

    def nodes(self) -> Sequence[Node]:
        """The nodes that are there now; a node may go, and another one come."""

    def now(self) -> float:
        """Seconds of this cluster's clock."""

    def start(self, orders: Sequence[Order], node: str, devices: Sequence[int]) -> None:
        """Starts a gang on some devices of a node, or several that share one. A failure to start is told as their end.

        Those that share a device also share a process. Each makes progress and ends by itself.
        """

    def stop(self, gang: int) -> None:
        """Asks a gang to save and end after the step under way."""

    def kill(self, gang: int) -> None:
        """Ends a gang at once, and those that share its process."""

    def wait(self, seconds: float) -> Sequence[Event]:
        """What has happened; waits up to ``seconds`` for something."""

    def close(self) -> None:
        """Ends all gangs at once."""
