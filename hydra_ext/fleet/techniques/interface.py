"""What a technique is, for the fleet and for users who write their own."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.runtime.placement.sharing import SharedDevice

Configuration = Mapping[str, Any]
"""What a technique has chosen for a job on some devices, as JSON."""


class WontDo(Exception):
    """A technique cannot train a job on these devices. The message says why.

    Attributes:
        smallest_budget: Device bytes with which it could; None if no budget would do.
    """

    def __init__(self, message: str, *, smallest_budget: int | None = None) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The processes that train one job together, as one of them sees it.

    With several ranks torch.distributed is initialised.

    Attributes:
        device: Of this rank.
        rank: Number of this rank.
        ranks: Number of all.
        shared: The device as jobs share it; None for techniques whose jobs never do.
    """

    device: Device
    rank: int
    ranks: int
    shared: SharedDevice | None = None

    def mean(self, losses: torch.Tensor) -> float:
        """The mean of all ranks' losses, added up in the order of the ranks."""
        if self.ranks == 1:
            return float(losses.mean())
        own = losses.float().cpu().contiguous()
        every = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(every, own)
        return float(torch.cat(every).mean())


class Session(ABC):
    """One job's training in this process, as one rank of its gang. All ranks make the same calls."""

    @abstractmethod
    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        """Makes a step, the schedule's included, and waits for it. Returns the mean loss of all ranks' microbatches.

        Args:
            microbatches: Of the whole step: the same on all ranks.
            seeds: One for each.
        """

    @abstractmethod
    def evaluate(self, microbatches: Sequence[Any]) -> float:
        """The mean loss of microbatches in evaluation mode, without gradients."""

    @abstractmethod
    def save(self, folder: Path, extra: Any) -> None:
        """Saves a checkpoint that every technique can load, as ``run.save`` does. Durable on return."""

    @abstractmethod
    def load(self, folder: Path) -> tuple[int, Any] | None:
        """Loads the newest checkpoint: its step and ``extra``; None if there is none."""

    @property
    @abstractmethod
    def trained(self) -> Sequence[tuple[Optimizer, LRScheduler | None]]:
        """This rank's optimizers, each with its schedule."""


class OwnOptions:
    """The options of a session's optimizers, such as learning rates, before a checkpoint of another job is loaded.

    A job that begins with another one's checkpoint has its weights, moments and steps, and options of its own.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._options = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer, _ in session.trained
        ]
        self._schedules = [None if schedule is None else schedule.state_dict() for _, schedule in session.trained]

    def put(self, step: int) -> None:
        """Puts them in the place of those that were loaded; a schedule is where it is after so many steps."""
        for (optimizer, schedule), groups, state in zip(
            self._session.trained, self._options, self._schedules, strict=True
        ):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
            if schedule is not None and state is not None:
                schedule.load_state_dict(state)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch misses the steps of the optimizer, which the other job made
                    for _ in range(step):
                        schedule.step()


class Technique(ABC):
    """A way to train a job. It has no state: each process makes its own object.

    Attributes:
        name: As in plans and reports.
        exact: Whether it gives the bits of the plain loop on any number of devices. The fleet checks this on the steps
            that it measures.
        bound: For others: how far the numbers may be from the plain loop's, in words.
        tenants: How many jobs may share one device and one process. Sessions on one device then open ``gang.shared``.
    """

    name: str
    exact: bool = True
    bound: str = ""
    tenants: int = 1

    @abstractmethod
    def counts(self, devices: int) -> Sequence[int]:
        """The numbers of devices of one node that it can use, up to ``devices``."""

    @abstractmethod
    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        """Chooses how to train a job on these devices. Nothing runs on them yet.

        Raises:
            WontDo: It cannot. Each technique says so as early as it can: a trial takes longer.
        """

    @abstractmethod
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> AbstractContextManager[Session]:
        """Builds model, optimizer and schedule on this rank. Leaving the context releases them."""
