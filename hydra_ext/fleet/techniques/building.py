"""Builds a job's parts, with the random numbers that its seed gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext import optim
from hydra_ext.errors import InvalidJob
from hydra_ext.fleet.job import Job, seed_of
from hydra_ext.optim.host_optimizer import HostOptimizer

_NUMPY_SEEDS = 2**32


def seed_everything(seed: int) -> None:
    """Seeds torch on all devices, Python's ``random``, and numpy's global generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEEDS)


def build_model(job: Job) -> nn.Module:
    """
    Raises:
        InvalidJob: The function gave no module.
    """
    seed_everything(job.seed)
    model = job.model()
    if not isinstance(model, nn.Module):
        raise InvalidJob(f"job {job.name!r}: model gave a {type(model).__name__}: let it return the torch.nn.Module")
    return model


def build_optimizer(job: Job, parameters: Iterable[Tensor]) -> Optimizer:
    """
    Raises:
        InvalidJob: The function gave no optimizer.
    """
    optimizer = job.optimizer(parameters)
    if not isinstance(optimizer, Optimizer):
        raise InvalidJob(
            f"job {job.name!r}: optimizer gave a {type(optimizer).__name__}: let it return the torch.optim.Optimizer"
        )
    return optimizer


def build_schedule(job: Job, optimizer: Optimizer) -> LRScheduler | None:
    return None if job.schedule is None else job.schedule(optimizer)


def clip_of(optimizer: Optimizer) -> Callable[..., Tensor]:
    """What clips gradients beside an optimizer, as ``run.step`` does."""
    return optim.clip_grad_norm_ if isinstance(optimizer, HostOptimizer) else nn.utils.clip_grad_norm_


class Batches:
    """A job's batches by the number of their step. An iterable is read on, and once more from its beginning."""

    def __init__(self, job: Job) -> None:
        self._job = job
        seed_everything(seed_of(job.seed, "data"))
        self._data = job.data()
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # step of the iterator's next batch

    def of_step(self, step: int) -> Sequence[Any]:
        """The microbatches of a step. Steps are asked for in order.

        Raises:
            InvalidJob: There is no batch, or it is no list of microbatches.
        """
        if isinstance(self._data, Sequence):
            if not self._data:
                raise InvalidJob(f"job {self._job.name!r}: data gave an empty list: it needs a batch at least")
            return self._checked(self._data[step % len(self._data)], step)
        while self._next < step:
            self._read()
        return self._checked(self._read(), step)

    def _read(self) -> Any:
        seed_everything(seed_of(self._job.seed, "batch", self._next))
        self._next += 1
        if self._iterator is not None:
            for batch in self._iterator:
                return batch
        self._iterator = iter(self._data)
        for batch in self._iterator:
            return batch
        raise InvalidJob(f"job {self._job.name!r}: data gave no batch: it needs one at least")

    def _checked(self, batch: Any, step: int) -> Sequence[Any]:
        if not isinstance(batch, list | tuple) or not batch:
            raise InvalidJob(
                f"job {self._job.name!r}: data gave a {type(batch).__name__} for step {step}: give a list of the "
                "step's microbatches, one at least"
            )
        return batch
