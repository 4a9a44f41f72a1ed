"""Jobs whose models, losses and optimizers look at what happens to them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Job
from support.fleet import trainings

WIDTH = trainings.WIDTH


class Tied(nn.Module):
    """Reads its first weight twice, draws random numbers, and has several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x)
        return found


def exact_loss(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    """Raises if anything ran under autocast or in another type than the weights'."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise TypeError("autocast is on, and the job has not asked for it")
    output = model(microbatch[0])
    if output.dtype != torch.float32:
        raise TypeError(f"the forward gave {output.dtype}")
    return nn.functional.cross_entropy(output, microbatch[1])


def autocast_loss(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        output = model(microbatch[0])
    if output.dtype != torch.bfloat16:
        raise TypeError(f"autocast gave {output.dtype}")
    return nn.functional.cross_entropy(output.float(), microbatch[1])


def two_groups(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """One group decays and the other does not."""
    given = list(parameters)
    groups = [
        {"params": [each for each in given if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in given if each.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def jobs() -> dict[str, Job]:
    """By what they are about."""
    tied: dict[str, Any] = {"model": Tied, "steps": 6}
    return {
        job.name: job
        for job in (
            trainings.job("no-autocast", loss=exact_loss, **tied),
            trainings.job("autocast", loss=autocast_loss, **tied),
            trainings.job("momentum", optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9), **tied),
            trainings.job("two-groups", optimizer=two_groups, **tied),
            trainings.job("ours", optimizer=partial(hydra_ext.optim.AdamW, lr=1e-2), **tied),
            trainings.job("stream", data=partial(trainings.Stream, 4), steps=6),
        )
    }
