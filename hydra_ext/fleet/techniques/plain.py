"""Plain PyTorch on one device: everything stays there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext.blocks import discover
from hydra_ext.checkpoint import choosing, loading, saving
from hydra_ext.checkpoint.format import manifest
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques import forecast
from hydra_ext.fleet.techniques.building import build_model, build_optimizer, build_schedule, clip_of
from hydra_ext.fleet.techniques.interface import Configuration, Gang, Session, Technique, WontDo
from hydra_ext.runtime.saving import snapshot
from hydra_ext.runtime.saving.snapshot import Training


class Plain(Technique):
    """Weights, gradients, optimizer state and activations on one device."""

    name = "plain"

    def counts(self, devices: int) -> Sequence[int]:
        return [1]

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        needed = forecast.plain_bytes(job)
        if needed > devices[0].budget:
            raise WontDo(
                f"weights, gradients and activations take {needed} bytes, and the device has {devices[0].budget}",
                smallest_budget=needed,
            )
        return {"bytes": needed}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        if gang.device.card is not None:
            total = torch.cuda.get_device_properties(gang.device.card).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gang.device.budget / total), gang.device.card)
        yield PlainSession(job, gang.device, int(configuration["bytes"]))


class LocalSession(Session):
    """A session whose model, optimizer and schedule are plain objects of this process.

    Args:
        place: Of the model.

    Attributes:
        steps: Number of optimizer steps made.
    """

    def __init__(self, job: Job, device: Device, place: torch.device) -> None:
        self.job = job
        self._device = device
        self.model = build_model(job).to(place)
        self.optimizer = build_optimizer(job, self.model.parameters())
        self.schedule = build_schedule(job, self.optimizer)
        self.steps = 0

    def loss(self, model: nn.Module, microbatch: Any) -> torch.Tensor:
        return self.job.loss(model, self._device.moved(microbatch))

    def clip(self) -> None:
        """Clips the gradients, if the job asks for it."""
        if self.job.max_norm is not None:
            clip_of(self.optimizer)(self.model.parameters(), self.job.max_norm)

    def save(self, folder: Path, extra: Any) -> None:
        training = self._training()
        contents = snapshot.take(training, snapshot.passing(training), step=self.steps, extra=extra)
        saving.save(folder, contents, keep=2, files=Files())

    def load(self, folder: Path) -> tuple[int, Any] | None:
        with choosing.newest(folder, Files(), lambda it: it.hold(manifest.SECTIONS), strict=False) as reader:
            if reader is None:
                return None
            snapshot.Return(self._training(), reader).put()
            found = loading.loaded(reader)
            self.steps = found.step
            return found.step, found.extra

    @property
    def trained(self) -> Sequence[tuple[Optimizer, LRScheduler | None]]:
        return [(self.optimizer, self.schedule)]

    def _training(self) -> Training:
        return Training(
            self.model,
            self.optimizer,
            discover(self.model, largest_bytes=sum(parameter.nbytes for parameter in self.model.parameters())),
            self._device.torch_device,
            None,
            {"schedule": self.schedule, "scaler": None},
            None,
            None,
        )


class PlainSession(LocalSession):
    """
    Args:
        needed: Device bytes without the optimizer's state, whose size shows in the first step; None if it fits.
    """

    def __init__(self, job: Job, device: Device, needed: int | None) -> None:
        super().__init__(job, device, device.torch_device)
        self._needed = needed

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        losses = []
        for microbatch, seed in zip(microbatches, seeds, strict=True):
            torch.manual_seed(seed)
            loss = self.loss(self.model, microbatch)
            (loss / len(microbatches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.clip()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self._check_room()
        return float(torch.stack(losses).mean())

    def _check_room(self) -> None:
        """A simulated device counts nothing here, so the sum is checked once."""
        if self._needed is not None and self._device.simulated is not None:
            state = sum(
                value.nbytes
                for entries in self.optimizer.state.values()
                for value in entries.values()
                if isinstance(value, torch.Tensor)
            )
            needed = self._needed + state
            if needed > self._device.budget:
                raise WontDo(
                    f"weights, gradients, activations and the optimizer's state take {needed} bytes, and the device "
                    f"has {self._device.budget}",
                    smallest_budget=needed,
                )
        self._needed = None

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        return evaluated(self.model, lambda each: self.loss(self.model, each), microbatches)


def evaluated(model: nn.Module, loss: Any, microbatches: Sequence[Any]) -> float:
    """The mean of losses in evaluation mode; the modules' modes stay as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return float(torch.stack([loss(each).detach() for each in microbatches]).mean())
    finally:
        for module, mode in modes:
            module.training = mode
