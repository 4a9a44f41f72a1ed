"""The training loop of a job, the same for all techniques, and the trial of a few steps."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hydra_ext.checkpoint import choosing
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.format.tensors import bytes_of
from hydra_ext.errors import InvalidJob
from hydra_ext.fleet.cluster.interface import Order
from hydra_ext.fleet.cluster.progress import ProgressWriter
from hydra_ext.fleet.job import Job, seed_of
from hydra_ext.fleet.techniques import Gang, OwnOptions, Session, Technique
from hydra_ext.fleet.techniques.building import Batches, seed_everything
from hydra_ext.runtime.placement.sharing import TenantFigures

WARM_UP, MEASURED = 2, 3  # steps of a trial: the first ones record and plan
CHECKPOINTS = "ckpt"

Request = tuple[Sequence[Any], Sequence[int]]  # microbatches of a step, and their seeds
Steps = Generator[Request, float, None]  # asks for steps, and gets their losses


class Decision(IntEnum):
    """What all ranks do before a step."""

    GO = 0
    SAVE = 1
    STOP = 2  # save and end


def agreed(gang: Gang, decision: Decision) -> Decision:
    """The first rank's decision, on every rank."""
    if gang.ranks == 1:
        return decision
    value = torch.tensor([int(decision)], device="cpu")
    dist.broadcast(value, 0)
    return Decision(int(value.item()))


class Loop:
    """Trains a job on from its newest checkpoint.

    Args:
        is_stopped: Whether it is to save and end.
    """

    def __init__(self, order: Order, job: Job, gang: Gang, is_stopped: Callable[[], bool]) -> None:
        self._order = order
        self.job = job
        self._gang = gang
        self._is_stopped = is_stopped
        self._folder = Path(order.folder) / CHECKPOINTS
        self._progress = ProgressWriter(order.progress_file, order.gang) if gang.rank == 0 else None

    def run(self, technique: Technique, *, begun: float) -> None:
        """
        Args:
            begun: When the process has begun, by ``time.monotonic()``.
        """
        with closing(self), technique.open(self.job, self._gang, self._order.configuration) as session:
            steps = self.steps(session, self.open(session, technique.name, begun))
            request = next(steps, None)
            while request is not None:
                request = go_on(steps, session.step(*request))

    def close(self) -> None:
        """Nothing is told any more."""
        if self._progress is not None:
            self._progress.close()

    def open(self, session: Session, technique: str, begun: float) -> int:
        """Loads the newest checkpoint, which may be another job's. Returns the number of steps made."""
        step = self._load(session)
        self._tell("opened", step, seconds=time.monotonic() - begun, technique=technique)
        return step

    def _load(self, session: Session) -> int:
        own = OwnOptions(session)
        found = session.load(self._folder)
        if found is None:
            return 0
        step = int(found[1]["step"])
        if found[1]["job"] != self.job.name:
            own.put(step)
        return step

    def steps(self, session: Session, step: int) -> Steps:
        """Goes on behind so many steps, to the job's end or until it is to stop. Asks for each step.

        So steps of several jobs can be made together.
        """
        job, batches, saved, loaded = self.job, Batches(self.job), time.monotonic(), step
        while step < job.steps:
            decision = agreed(self._gang, self._decided(saved))
            if decision is not Decision.GO:
                self._save(session, step)
                saved = time.monotonic()
            if decision is Decision.STOP:
                self._tell("stopped", step)
                return
            begun = time.monotonic()
            microbatches = batches.of_step(step)
            loss = yield microbatches, job.seeds(step, len(microbatches))
            step += 1
            self._tell("step", step, loss=loss, seconds=time.monotonic() - begun)
        if step > loaded or step == 0:
            self._save(session, step)  # before the evaluation, which may fail
        self._tell("done", step, evaluation=self._evaluated(session, step))

    def _evaluated(self, session: Session, step: int) -> float | None:
        if self.job.evaluate is None:
            return None
        self._tell("evaluating", step)
        seed_everything(seed_of(self.job.seed, "evaluation"))
        microbatches = list(self.job.evaluate())
        if not microbatches:
            raise InvalidJob(f"job {self.job.name!r}: evaluate gave no microbatch: it needs one at least")
        return session.evaluate(self._heard(microbatches, step))

    def _heard(self, microbatches: list[Any], step: int) -> Sequence[Any]:
        """Microbatches of an evaluation: each gives a sign of life, as an evaluation may take long."""
        return _Heard(microbatches, lambda: self._tell("evaluating", step))

    def _decided(self, saved: float) -> Decision:
        if self._is_stopped():
            return Decision.STOP
        return Decision.SAVE if time.monotonic() - saved > self._order.settings.interval else Decision.GO

    def _save(self, session: Session, step: int) -> None:
        begun = time.monotonic()
        session.save(self._folder, {"step": step, "job": self.job.name})
        self._tell("saved", step, seconds=time.monotonic() - begun)

    def _tell(self, event: str, step: int, **more: Any) -> None:
        if self._progress is not None:
            self._progress.write(event, step, time=time.time(), **more)


def go_on(steps: Steps, loss: float) -> Request | None:
    """Tells the loss of a step. Returns what is asked for next; None at the end."""
    try:
        return steps.send(loss)
    except StopIteration:
        return None


class _Heard(Sequence[Any]):
    """A sequence that tells whenever an item is taken."""

    def __init__(self, items: Sequence[Any], tell: Callable[[], None]) -> None:
        self._items = items
        self._tell = tell

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: Any) -> Any:
        self._tell()
        return self._items[place]


def try_out(order: Order, job: Job, gang: Gang, technique: Technique, *, begun: float) -> None:
    """Measures a few steps. The first rank leaves the result in the order's file.

    The result has the seconds of opening, of a step and of saving, and a digest of losses and weights. Of a technique
    that shares its device it also has the seconds in which a step uses each resource.

    Args:
        begun: When the process has begun, by ``time.monotonic()``.
    """
    folder = Path(order.folder) / f"gang-{order.gang}.ckpt"
    batches, losses, seconds = Batches(job), list[float](), list[float]()
    figures = list[TenantFigures]()  # of a shared device, before each step and at the end
    with technique.open(job, gang, order.configuration) as session:
        opened = time.monotonic() - begun
        for step in range(min(WARM_UP + MEASURED, job.steps)):
            figures += [] if gang.shared is None else gang.shared.report().tenants
            begun = time.monotonic()
            microbatches = batches.of_step(step)
            losses.append(session.step(microbatches, job.seeds(step, len(microbatches))))
            gang.device.synchronize()
            seconds.append(time.monotonic() - begun)
        figures += [] if gang.shared is None else gang.shared.report().tenants
        begun = time.monotonic()
        session.save(folder, {"step": len(losses)})
        saved = time.monotonic() - begun
    if gang.rank == 0:
        result = {
            "open_s": opened,
            "step_s": statistics.median(seconds[WARM_UP:] or seconds[-1:]),
            "save_s": saved,
            "digest": digest(folder, losses),
        }
        if figures:
            result["loads"] = loads_of(figures)
        write_result(order.result_file, result)


def loads_of(figures: Sequence[TenantFigures]) -> dict[str, float]:
    """Seconds in which a step uses each resource of its device, between the figures of the steps that count."""
    first = figures[WARM_UP] if len(figures) > WARM_UP + 1 else figures[-2]
    steps = max(1, figures[-1].steps - first.steps)
    return {resource: (seconds - first.loads[resource]) / steps for resource, seconds in figures[-1].loads.items()}


def digest(folder: Path, losses: list[float]) -> str:
    """Of losses, and of all weights and buffers of the newest checkpoint, bit by bit."""
    found = hashlib.sha256(repr(losses).encode())
    with choosing.newest(folder, Files(), lambda reader: reader.hold(("model",))) as reader:
        if reader is not None:
            for name in sorted(reader.manifest.tensors.get("model", {})):
                found.update(name.encode())
                found.update(bytes_of(reader.read("model", name)))
    return found.hexdigest()


def write_result(path: Path, result: Any) -> None:
    """Writes a file that readers see whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(result))
    os.replace(draft, path)
