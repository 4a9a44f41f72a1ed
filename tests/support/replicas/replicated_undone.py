"""Ranks of which one runs out of device memory at a chosen block, and is undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Checks
from support.replicas.replicated import OPTIMIZERS, Job, Recorder, Seen, values_of
from support.rounds.running_out import BUDGET, LAYERS, WIDTH, Case, Device, Net

DISTURBED = 1  # the step that fails: by then the engine has recorded its order, and a plan is followed
EVERY_BLOCK = {
    "forward": [Case(where="forward", block=block, at=(3,), recorded=False) for block in range(LAYERS + 1)],
    # At the last microbatch: the ranks have met by then, and have averaged the gradients of later blocks.
    "backward": [Case(where="backward", block=block, at=(4,), recorded=False) for block in range(LAYERS + 1)],
}


@dataclass(frozen=True)
class Normed(Job):
    """Trains a model with running statistics and dropout."""

    m: tuple[int, ...] = (4,)
    steps: int = 3
    optimizer: str = "ours"
    max_norm: float | None = 0.5

    def make(self, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(rank)
        model = Net(recorded=False)
        return model, OPTIMIZERS[self.optimizer]([*model.parameters()])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    def microbatches(self, rank: int, step: int) -> list[tuple[int, dict[str, Tensor]]]:
        found = []
        for index in range(self.m[0]):
            seed = 1000 * step + 10 * index + rank
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(16, WIDTH, generator=generator)
            found.append((seed, {"x": x, "y": torch.randint(0, 8, (16,), generator=generator)}))
        return found


def train_each(rank: int, job: Job, failing: int, cases: Sequence[Case]) -> list[tuple[int, int, Seen]]:
    """Trains once for each case, in which the ``failing`` rank's device runs out of memory, and no other one.

    Returns:
        The failures of this rank's device, the retries that the rank has counted, and the results of the training.
    """
    return [_train(rank, job, case if rank == failing else None) for case in cases]


def _train(rank: int, job: Job, case: Case | None) -> tuple[int, int, Seen]:
    model: Any
    model, optimizer = job.make(rank)
    recorder = Recorder(model, optimizer)
    blocks, checks = [*model.layers, model.head], Checks(poison_hosts=True)
    with hydra_ext.offload(
        model, optimizer, budget=BUDGET, blocks=blocks, checks=checks, activations=job.activations
    ) as run:
        device = None if case is None else Device(run, case)

        def loss(batch: Any) -> Tensor:
            if device is not None:
                device.recovered()
            return job.loss(model, batch)

        for step in range(job.steps):
            if device is not None:
                device.armed = step == DISTURBED
            given = job.microbatches(rank, step)
            out = run.step(
                [batch for _, batch in given],
                loss,
                seeds=[seed for seed, _ in given],
                max_norm=job.max_norm,
                recompute=job.recompute,
            )
            recorder.seen["losses"] += values_of(out.losses)
            recorder.seen["norms"] += values_of([out.grad_norm])
            recorder.step_ended()
        retries = run.report().retries
    return 0 if device is None else device.failed, retries, recorder.end()
