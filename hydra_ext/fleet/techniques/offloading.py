"""``hydra_ext.offload`` on one device, and on several ranks whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques import forecast
from hydra_ext.fleet.techniques.building import build_model, build_optimizer, build_schedule
from hydra_ext.fleet.techniques.interface import Configuration, Gang, Session, Technique, WontDo
from hydra_ext.fleet.techniques.plain import evaluated
from hydra_ext.offload import offload
from hydra_ext.runtime.run import Run


class Offloading(Technique):
    """``hydra_ext.offload`` with the device's budget."""

    name = "offload"

    def counts(self, devices: int) -> Sequence[int]:
        return [1]

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        forecast.expect_fit(job, devices[0].budget)
        return {}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        model = build_model(job)
        optimizer = build_optimizer(job, model.parameters())
        schedule = build_schedule(job, optimizer)
        with offload(model, optimizer, budget=gang.device.budget, device=gang.device.given) as run:
            yield OffloadSession(job, run, schedule, gang)


class DataParallel(Offloading):
    """``hydra_ext.offload`` on several ranks: each takes its part of every step's microbatches."""

    name = "data parallel"
    exact = False
    bound = (
        "gradients are sums of ranks' sums: at most 2(n - 1)u / (1 - (n - 1)u) of the sum of their magnitudes, for n "
        "microbatches and u half of the dtype's epsilon"
    )

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
    def __init__(self, job: Job, run: Run, schedule: Any, gang: Gang) -> None:
        self._job = job
        self._run = run
        self._schedule = schedule
        self._gang = gang

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        gang = self._gang
        if len(microbatches) % gang.ranks:
            raise WontDo(f"a step has {len(microbatches)} microbatches, which {gang.ranks} ranks cannot share equally")
        share = len(microbatches) // gang.ranks
        own = slice(gang.rank * share, (gang.rank + 1) * share)
        output = self._run.step(
            list(microbatches[own]), self._loss, max_norm=self._job.max_norm, seeds=list(seeds[own])
        )
        if self._schedule is not None:
            self._schedule.step()
        return self._mean(torch.stack(output.losses), len(microbatches))

    def _mean(self, losses: torch.Tensor, count: int) -> float:
        """Of all ranks' losses, added up as in the plain loop."""
        if self._gang.ranks == 1:
            return float(losses.mean())
        own = losses.float().cpu().contiguous()
        every = [torch.empty_like(own) for _ in range(self._gang.ranks)]
        dist.all_gather(every, own)
        return float(torch.cat(every).mean())

    def _loss(self, microbatch: Any) -> torch.Tensor:
        return self._job.loss(self._run.model, self._moved(microbatch))

    def _moved(self, microbatch: Any) -> Any:
        device = self._run.device
        if device.type == "cpu":
            return microbatch
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), microbatch)

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        return evaluated(self._run.model, self._loss, microbatches)

    def save(self, folder: Path, extra: Any) -> None:
        self._run.save(folder, extra=extra, schedule=self._schedule)

    def load(self, folder: Path) -> tuple[int, Any] | None:
        found = self._run.load(folder, schedule=self._schedule)
        return None if found is None else (found.step, found.extra)
