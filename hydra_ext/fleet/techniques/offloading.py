"""``hydra_ext.offload`` on one device, and on several ranks whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques import forecast
from hydra_ext.fleet.techniques.building import build_model, build_optimizer, build_schedule
from hydra_ext.fleet.techniques.interface import Configuration, Gang, Session, Technique, WontDo
from hydra_ext.fleet.techniques.plain import evaluated
from hydra_ext.offload import offload
from hydra_ext.runtime.run import Run

SUMS_OF_SUMS = (
    "gradients are sums of ranks' sums: at most 2(n - 1)u / (1 - (n - 1)u) of the sum of their magnitudes, for n "
    "microbatches and u half of the dtype's epsilon"
)


class Offloading(Technique):
    """``hydra_ext.offload`` with the device's budget.

    Attributes:
        parts: Equal parts of the budget, of which a job has one.
    """

    name = "offload"
    parts: int = 1

    def counts(self, devices: int) -> Sequence[int]:
        return [1]

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        forecast.expect_fit(job, devices[0].budget, parts=self.parts)
        return {}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        model = build_model(job)
        optimizer = build_optimizer(job, model.parameters())
        schedule = build_schedule(job, optimizer)
        place = gang.device.given if gang.shared is None else gang.shared
        with offload(model, optimizer, budget=gang.device.budget // self.parts, device=place) as run:
            yield OffloadSession(job, run, (optimizer, schedule), gang)


class Sharing(Offloading):
    """``hydra_ext.offload`` on a device that two jobs share, block by block: :class:`hydra_ext.SharedDevice`."""

    name = "shared offload"
    tenants = parts = 2


class DataParallel(Offloading):
    """``hydra_ext.offload`` on several ranks: each takes its part of every step's microbatches."""

    name = "data parallel"
    exact = False
    bound = SUMS_OF_SUMS

    def counts(self, devices: int) -> Sequence[int]:
        return range(2, devices + 1)

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        _, microbatches = forecast.first_step(job)
        if len(microbatches) % len(devices):
            raise WontDo(
                f"a step has {len(microbatches)} microbatches, which {len(devices)} ranks cannot share equally; the "
                "batch stays as it is"
            )
        return super().search(job, devices)


class OffloadSession(Session):
    trained: Sequence[tuple[Optimizer, LRScheduler | None]] = ()

    def __init__(self, job: Job, run: Run, trained: tuple[Optimizer, LRScheduler | None], gang: Gang) -> None:
        self._job = job
        self._run = run
        self.trained = [trained]
        _, self._schedule = trained
        self._gang = gang

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        own = share_of(microbatches, self._gang)
        output = self._run.step(
            list(microbatches[own]), self._loss, max_norm=self._job.max_norm, seeds=list(seeds[own])
        )
        if self._schedule is not None:
            self._schedule.step()
        return self._gang.mean(torch.stack(output.losses))

    def _loss(self, microbatch: Any) -> torch.Tensor:
        return self._job.loss(self._run.model, self._gang.device.moved(microbatch))

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        return evaluated(self._run.model, self._loss, microbatches)

    def save(self, folder: Path, extra: Any) -> None:
        self._run.save(folder, extra=extra, schedule=self._schedule)

    def load(self, folder: Path) -> tuple[int, Any] | None:
        found = self._run.load(folder, schedule=self._schedule, strict=False)
        return None if found is None else (found.step, found.extra)


def share_of(microbatches: Sequence[Any], gang: Gang) -> slice:
    """A rank's part of a step's microbatches.

    Raises:
        WontDo: The ranks cannot share them equally.
    """
    if len(microbatches) % gang.ranks:
        raise WontDo(f"a step has {len(microbatches)} microbatches, which {gang.ranks} ranks cannot share equally")
    share = len(microbatches) // gang.ranks
    return slice(gang.rank * share, (gang.rank + 1) * share)
