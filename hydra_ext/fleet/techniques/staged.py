"""``hydra_ext.Pipeline``: stages of one model on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques import forecast
from hydra_ext.fleet.techniques.building import (
    Batches,
    build_model,
    build_optimizer,
    build_schedule,
    clip_of,
    seed_everything,
)
from hydra_ext.fleet.techniques.interface import Configuration, Gang, Session, Technique, WontDo
from hydra_ext.optim import clip_grad_norm_
from hydra_ext.pipeline import Pipeline


class Staged(Technique):
    """``hydra_ext.Pipeline`` with the numbers of plain training, one stage on each device."""

    name = "pipeline"

    def counts(self, devices: int) -> Sequence[int]:
        return range(2, devices + 1)

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        model, microbatches = forecast.first_step(job)
        if job.exact and draws(model, job, microbatches[0]):
            raise WontDo(
                "the forward draws random numbers, and a pipeline draws others than the plain loop; exact=False allows "
                "them"
            )
        clips = job.exact and job.max_norm is not None
        if clips and clip_of(build_optimizer(job, model.parameters())) is not clip_grad_norm_:
            raise WontDo(
                "a pipeline clips as hydra_ext.optim.clip_grad_norm_ does, and beside this optimizer the plain loop "
                "clips as torch does; take one of hydra_ext.optim, or exact=False"
            )
        return {"schedule": "1f1b", "microbatches": len(microbatches)}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        model = build_model(job)
        first = Batches(job).of_step(0)
        seed_everything(job.seed)
        with Pipeline(
            model,
            lambda parameters: build_optimizer(job, parameters),
            schedule=configuration["schedule"],
            microbatches=int(configuration["microbatches"]),
            budget=gang.device.budget,
            device=gang.device.given,
            seed=job.seed,
        ) as pipe:
            yield StagedSession(job, model, pipe, first[0])


class Delayed(Staged):
    """PipeDream-2BW's schedule: no bubble, and gradients of the weights before the newest."""

    name = "pipeline 2bw"
    exact = False
    bound = "step t uses gradients of the weights before the newest: W(t+1) = W(t) - lr * grad f(W(t-1))"

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        if not job.delayed:
            raise WontDo("delayed=True, with exact=False, allows gradients of older weights")
        found = super().search(job, devices)
        return {**found, "schedule": "2bw"}


class StagedSession(Session):
    def __init__(self, job: Job, model: nn.Module, pipe: Pipeline, microbatch: Any) -> None:
        self._job = job
        self._model = model
        self._pipe = pipe
        pipe.prepare(microbatch, self._loss)
        self._schedules = [build_schedule(job, optimizer) for optimizer in pipe.optimizers]

    def _loss(self, microbatch: Any) -> torch.Tensor:
        return self._job.loss(self._model, microbatch)

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        output = self._pipe.step(list(microbatches), self._loss, max_norm=self._job.max_norm, seeds=list(seeds))
        for schedule in self._schedules:
            if schedule is not None:
                schedule.step()
        return float(output.loss)

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        self._model.eval()
        try:
            losses = [self._pipe.evaluate([each], self._loss).losses[0] for each in microbatches]
        finally:
            self._model.train()
        return float(torch.stack(losses).mean())

    def save(self, folder: Path, extra: Any) -> None:
        self._pipe.save(folder, extra=extra, schedule=self._helpers())

    def load(self, folder: Path) -> tuple[int, Any] | None:
        found = self._pipe.load(folder, schedule=self._helpers(), strict=False)
        return None if found is None else (found.step, found.extra)

    @property
    def trained(self) -> Sequence[tuple[Optimizer, LRScheduler | None]]:
        return list(zip(self._pipe.optimizers, self._schedules, strict=True))

    def _helpers(self) -> list[Any] | None:
        return None if self._job.schedule is None else self._schedules


def draws(model: nn.Module, job: Job, microbatch: Any) -> bool:
    """Whether a forward draws random numbers."""
    before = torch.get_rng_state()
    with torch.no_grad():
        job.loss(model, microbatch)
    return not torch.equal(before, torch.get_rng_state())
