"""A fleet on a cluster in virtual time: jobs by the seconds that they take with some devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from hydra_ext.fleet.scheduling.planning import FleetPlan, Planner, Work, follow_plan, make_plan
from hydra_ext.fleet.scheduling.records import JobRecord
from hydra_ext.fleet.scheduling.scheduler import Scheduler
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.scheduling.trials import Option, SharingOption
from support.fleet.virtual_cluster import Fault, Speed, Stretch, VirtualCluster

Curve = Mapping[int, float]  # seconds of a job by the number of devices

NEVER = 1e12  # seconds


def exact(job: str, technique: str, devices: int) -> float:
    return 1.0


@dataclass
class VirtualFleet:
    """
    Attributes:
        sizes: Devices of each node.
        jobs: By name, without opening and saving; each number of devices is a technique of its own, named after it.
        loads: By job: for which part of a step it uses each resource. These jobs may also share a device.
        errors: Called with job, technique and devices: what the seconds are, over what trials say.
        entries: The journal.
    """

    sizes: Mapping[str, int]
    jobs: Mapping[str, Curve]
    steps: int = 10_000
    open: float = 0.0
    save: float = 0.0
    loads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    interval: float = 1000.0
    patience: float = 1800.0
    errors: Callable[[str, str, int], float] = exact
    faults: Sequence[Fault] = ()
    planner: Planner = make_plan
    entries: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.cluster = VirtualCluster(self.sizes, self._speed, self.faults)
        self.records = {name: self._record_of(name, curve) for name, curve in self.jobs.items()}
        settings = Settings(interval=self.interval, patience=self.patience)
        self.scheduler = Scheduler(
            self.cluster,
            list(self.records.values()),
            settings,
            gangs=count(1),
            record=self._note,
            planner=self.planner,
        )

    def run(self) -> float:
        """The seconds until the last gang has ended. Nothing is left."""
        self.scheduler.run()
        assert not list(self.cluster.running())
        assert all(record.running is None for record in self.records.values())
        assert [entry["gang"] for entry in self.events("start")] == sorted(e["gang"] for e in self.events("end"))
        return self.cluster.now()

    def stretches(self, job: str) -> list[Stretch]:
        return [stretch for stretch in self.cluster.stretches if stretch.job == job]

    def events(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["event"] == event]

    @property
    def moves(self) -> int:
        return len(self.events("move"))

    def _note(self, event: str, **more: Any) -> None:
        self.entries.append({"event": event, **more})

    def _speed(self, job: str, technique: str, devices: int) -> Speed:
        factor = self.errors(job, technique, devices)
        return Speed(factor * self.jobs[job][devices] / self.steps, open=self.open, save=self.save)

    def _record_of(self, name: str, curve: Curve) -> JobRecord:
        options = [
            Option(
                technique=f"on {devices}",
                name=f"on {devices}",
                devices=devices,
                configuration={},
                bound="",
                step_s=seconds / self.steps,
                open_s=self.open,
                save_s=self.save,
            )
            for devices, seconds in curve.items()
        ]
        if name in self.loads:
            step = curve[1] / self.steps
            loads = {resource: step * part for resource, part in self.loads[name].items()}
            facts = asdict(options[0]) | {"technique": "shared", "name": "shared"}
            options.append(SharingOption(**facts, loads=loads))
        return JobRecord({"name": name, "steps": self.steps}, options, f"/nowhere/{name}")


def once(works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None) -> FleetPlan:
    """Plans at the beginning, and follows this plan to the end."""
    followed = None if before is None else follow_plan(works, nodes, before)
    return followed or make_plan(works, nodes, seed=seed, before=None)
