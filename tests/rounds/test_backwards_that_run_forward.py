"""Backwards that change buffers: what the user's own checkpoints run again does so in the order of the loop."""

from __future__ import annotations

import copy
import logging
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext import Checks, SimulatedDevice

WIDTH = 16
STEPS = torch.randn(3, 4, 6, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()


class Checkpointed(nn.Module):
    """Batch statistics are updated in forward, and once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, before: Tensor) -> None:
    (model(before).pow(2).mean()).backward()  # a gradient from before the steps
    for microbatches in STEPS:
        for microbatch in microbatches:
            (model(microbatch).pow(2).mean() / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("activations", [None, "auto"])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("recompute", [None, True])
def test_such_rounds_are_undone_and_made_one_microbatch_at_a_time(
    recompute: bool | None,
    size: int | None,
    activations: Literal["auto"] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    plain = Checkpointed()
    model = copy.deepcopy(plain)
    before = torch.randn(6, WIDTH)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(
        model, optimizer, budget=2**20, device=SimulatedDevice(), checks=checks, activations=activations
    ) as run:
        model(before).pow(2).mean().backward()
        with caplog.at_level(logging.WARNING):
            for microbatches in STEPS:
                run.step(microbatches, lambda x: model(x).pow(2).mean(), recompute=recompute, round_size=size)
        report = run.report()
    if activations is None:  # otherwise the sizes of rounds depend on measurements
        told = [record.levelname for record in caplog.records if "has changed buffers" in record.message]
        assert told == ["WARNING"]
        known = size is None or recompute is None  # from the first round, which is one of a single microbatch
        assert report.refusals == (0 if known else 1)
        assert report.fallbacks > 0
    assert report.retries == 0
    for (name, expected), got in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(expected, got), name
