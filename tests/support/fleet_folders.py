"""Folders of fleets that have not run: journals and progress files, by the writers that fleets have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.fleet import Job
from hydra_ext.fleet.cluster.interface import Node
from hydra_ext.fleet.cluster.progress import ProgressWriter
from hydra_ext.fleet.devices import choose
from hydra_ext.fleet.journal import Journal
from hydra_ext.fleet.scheduling.trials import Measured, Option, kind_of
from hydra_ext.policy import SimulatedDevice

BEGIN = 1_700_000_000.0  # of the wall clock, when the fleet began


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def batches(width: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [[(torch.randn(4, width), torch.randint(0, 3, (4,)))] for _ in range(3)]


def loss(module: nn.Module, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(module(microbatch[0]), microbatch[1])


def job(name: str, *, width: int = 4, steps: int = 10, lr: float = 0.1) -> Job:
    return Job(
        name,
        model=partial(model, width),
        optimizer=partial(torch.optim.SGD, lr=lr),
        data=partial(batches, width),
        loss=loss,
        steps=steps,
    )


def option(name: str, devices: int, step_s: float = 1.0) -> Option:
    return Option(
        technique=f"place of {name}",
        name=name,
        devices=devices,
        configuration={},
        bound="" if name != "data parallel" else "sums of sums",
        step_s=step_s,
        open_s=0.5,
        save_s=0.25,
    )


class Written:
    """A fleet's folder that is being written, as its process and its gangs would.

    Args:
        devices: Number of simulated devices of its one node.
    """

    def __init__(self, folder: Path, jobs: Sequence[Job], *, devices: int = 2) -> None:
        self.folder = folder
        self._jobs = {job.name: job.describe() for job in jobs}
        chosen = choose([SimulatedDevice()] * devices, "1MiB")
        self._node = Node(name="here", devices=tuple(chosen))
        self._began = BEGIN  # by the wall clock, less the times when the fleet did not run
        described = [device.describe() for device in chosen]
        self._write("fleet", jobs=list(self._jobs.values()), devices=described, time=BEGIN)

    def begin(self, at: float, *, idle: float = 0.0) -> None:
        """A process begins to run the fleet, or goes on, ``idle`` seconds after the one before has ended."""
        self._began += idle
        self.note("begin", at, threads=1)

    def note(self, event: str, at: float, **more: Any) -> None:
        """An entry of the journal, ``at`` seconds after the fleet's beginning."""
        self._write(event, at=at, time=self._began + at, **more)

    def measured(self, name: str, options: Sequence[Option], **refused: str) -> None:
        found = Measured(options=options, refused={key.replace("_", " "): why for key, why in refused.items()})
        self._write("measured", kind=kind_of(self._jobs[name], self._node), measured=found.describe())

    def plan(self, at: float, packs: Sequence[Sequence[str]] = (), **jobs: tuple[int, float, float]) -> None:
        """A plan: option, start and end of each job, after ``at``."""
        makespan = max(end for _, _, end in jobs.values())
        placed = {name: [option, "here", start, end] for name, (option, start, end) in jobs.items()}
        self.note("plan", at, makespan=makespan, bound=None, packs=packs, jobs=placed)

    def start(self, at: float, name: str, gang: int, option: int, technique: str, *devices: int) -> None:
        more = {"option": option, "technique": technique, "node": "here", "devices": list(devices)}
        self.note("start", at, job=name, gang=gang, **more)

    def end(self, at: float, name: str, gang: int, step: int, state: str, failure: str | None = None) -> None:
        self.note(
            "end",
            at,
            job=name,
            gang=gang,
            step=step,
            state=state,
            failure=failure,
            wont_do=str(failure).startswith("WontDo:"),
        )

    def progress(self, at: float, name: str, gang: int, event: str, step: int, **more: Any) -> None:
        """A record of a job's progress file."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        writer = ProgressWriter(folder / "progress.jsonl", gang)
        writer.write(event, step, time=self._began + at, **more)
        writer.close()

    def steps(self, at: float, name: str, gang: int, first: int, last: int, *, seconds: float = 1.0) -> None:
        """Steps ``first`` to ``last``, of so many seconds each, after the gang has opened at ``at``.

        The first one says that it has taken longer, as those of real gangs do.
        """
        self.progress(at, name, gang, "opened", first - 1, seconds=0.1)
        for number, step in enumerate(range(first, last + 1), 1):
            self.progress(
                at + number * seconds,
                name,
                gang,
                "step",
                step,
                loss=2.0 / step,
                seconds=seconds * (9 if number == 1 else 1),
            )

    def _write(self, event: str, **more: Any) -> None:
        journal = Journal(self.folder)
        journal.write(event, **more)
        journal.close()


OPTIONS = (option("plain", 1), option("offload", 1, 3.0), option("pipeline", 2, 0.5))


def eventful(folder: Path) -> Written:
    """Four jobs on two devices: ``a`` runs as planned, ``b`` fails once and moves, ``c`` is set aside, ``d`` waits."""
    written = Written(folder, [job("a"), job("b", lr=0.2), job("c", width=6), job("d", width=6, lr=0.3)])
    written.begin(0.0)
    written.measured("a", OPTIONS, data_parallel_on_2="exact=True rules it out")
    written.measured("c", OPTIONS[:1], offload_on_1="it needs <more> & other things")
    written.plan(5.0, a=(0, 0.0, 10.0), b=(0, 0.0, 10.0), c=(0, 10.0, 20.0), d=(0, 10.0, 20.0))
    written.start(5.0, "a", 11, 0, "plain", 0)
    written.start(5.0, "b", 12, 0, "plain", 1)
    written.steps(5.0, "a", 11, 1, 10)
    written.steps(5.0, "b", 12, 1, 4)
    written.end(9.5, "b", 12, 4, "running", "rank 0 was killed by signal -9")
    written.start(9.5, "b", 13, 0, "plain", 1)
    written.progress(15.0, "a", 11, "saved", 10, seconds=0.1)
    written.progress(15.0, "a", 11, "done", 10, evaluation=0.125)
    written.end(15.0, "a", 11, 10, "done")
    written.steps(9.5, "b", 13, 1, 6)
    written.start(15.0, "c", 14, 0, "plain", 0)
    written.end(16.0, "c", 14, 0, "running", "ValueError: <no> such data")
    written.note("set aside", 16.0, job="c", failures=["ValueError: <no> such data"] * 3, trace="")
    written.plan(16.0, b=(2, 0.0, 4.0), d=(0, 4.0, 14.0))
    written.note("move", 16.0, job="b", option=2)
    written.progress(16.5, "b", 13, "saved", 6, seconds=0.1)
    written.progress(16.5, "b", 13, "stopped", 6)
    written.end(16.5, "b", 13, 6, "moving")
    written.start(16.5, "b", 15, 2, "pipeline", 0, 1)
    written.steps(17.0, "b", 15, 7, 8, seconds=0.5)
    return written


class Recorder:
    """A tracker that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def job_step(self, job: str, step: int, loss: float, seconds: float) -> None:
        self.heard.append(("step", job, step, loss, seconds))

    def job_ended(self, job: str, *, is_done: bool, evaluation: float | None) -> None:
        self.heard.append(("ended", job, is_done, evaluation))

    def close(self) -> None:
        self.heard.append(("close",))
