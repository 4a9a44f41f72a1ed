"""Jobs that train adapters of one frozen base, and the steps that they make together."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import SimulatedDevice
from hydra_ext.fleet import Job
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.techniques import Gang
from hydra_ext.fleet.techniques.building import Batches
from hydra_ext.fleet.techniques.common import Asked, Common, Member
from support.fleet import trainings

WIDTH = 64
BUDGET = 3 * 4 * WIDTH * (WIDTH + 1) + 2**15  # of six layers
DEVICE = SimulatedDevice(to_device_bytes_per_second=1e7, to_host_bytes_per_second=1e7)


def job(name: str, *, rank: int = 4, dropout: float = 0.0, **options: Any) -> Job:
    model = partial(trainings.adapted, width=WIDTH, rank=rank, dropout=dropout)
    data = partial(trainings.batches, width=WIDTH)
    given: dict[str, Any] = {"model": model, "data": data, "evaluate": evaluation, "steps": 6}
    return trainings.job(name, **(given | options))


def evaluation() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, WIDTH), torch.randint(0, 5, (6,))) for _ in range(3)]


def several() -> list[Job]:
    """They differ in all that jobs with one base may differ in."""
    return [
        job("a", seed=1, dropout=0.3),
        job("b", seed=2, rank=8, steps=8, optimizer=partial(hydra_ext.optim.AdamW, lr=1e-2)),
        job("c", schedule=None, max_norm=None, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), evaluate=None),
        job("d", steps=5, data=partial(trainings.batches, width=WIDTH, microbatches=3)),
    ]


def two() -> list[Job]:
    """They differ in their seeds and rates, and are measured once."""
    return [job("a", seed=1, dropout=0.3), job("b", seed=2, dropout=0.3, optimizer=partial(torch.optim.AdamW, lr=1e-3))]


def draws(model: nn.Module, microbatch: Any) -> Tensor:
    return trainings.loss(model, microbatch) * random.random()


# ---- step by step ---------------------------------------------------------------------------------------------------


SLOW_LINK = SimulatedDevice(to_device_bytes_per_second=3e6, to_host_bytes_per_second=3e6)


def gang(budget: int = BUDGET, simulated: SimulatedDevice | None = None) -> Gang:
    device = Device(name="simulated", card=None, simulated=simulated or SimulatedDevice(), budget=budget)
    return Gang(device=device, rank=0, ranks=1)


class Together:
    """Some jobs that make their steps together, step by step."""

    def __init__(self, common: Common, jobs: Sequence[Job]) -> None:
        self.common = common
        self.members: list[Member] = []
        self.shared: list[int] = []
        self._batches: list[Batches] = []
        self.losses: dict[str, list[float | BaseException]] = {each.name: [] for each in jobs}
        for each in jobs:
            member = common.admit(each)
            self.shared.append(common.share(member))
            self.members.append(member)
            self._batches.append(Batches(each))

    def step(self, which: Sequence[int] | None = None) -> None:
        """A step of all jobs, or of some."""
        chosen = range(len(self.members)) if which is None else which
        asked = []
        for number in chosen:
            member = self.members[number]
            microbatches = self._batches[number].of_step(member.steps)
            asked.append(Asked(member, microbatches, member.job.seeds(member.steps, len(microbatches))))
        for each, outcome in zip(asked, self.common.step(asked), strict=True):
            self.losses[each.member.job.name].append(outcome)

    def moved(self, which: Sequence[int] | None = None) -> int:
        """Bytes of weights that a step moves."""
        assert self.common.run is not None
        before = self.common.run.report().weights_moved_bytes
        self.step(which)
        return self.common.run.report().weights_moved_bytes - before


@contextmanager
def begun(jobs: Sequence[Job], budget: int = BUDGET, simulated: SimulatedDevice | None = None) -> Iterator[Together]:
    with Common(gang(budget, simulated)) as common:
        yield Together(common, jobs)


def assert_alone(found: Together, jobs: Sequence[Job]) -> None:
    for each, member in zip(jobs, found.members, strict=True):
        weights, losses, _ = trainings.plainly(each, threads=torch.get_num_threads())
        assert found.losses[each.name] == losses[: member.steps]
        if member.steps == each.steps:
            state = member.model.state_dict()
            assert state.keys() == weights.keys()
            assert all(torch.equal(state[name], weights[name]) for name in weights)
