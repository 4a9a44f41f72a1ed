"""Rounds that are undone on a shared device leave the state of other runs' models alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice

WIDTH, STEPS = 32, 6


class Counting(nn.Module):
    """Scales by the number of its calls, so that microbatches cannot pass it together: their rounds are undone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        calls: Any = self.calls
        calls += 1
        return x * self.weight / calls


def model_of(seed: int, middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    ends = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(ends[0], ends[1], middle, ends[2], nn.BatchNorm1d(WIDTH), ends[3])


def counted(device: Any) -> tuple[list[Tensor], int]:
    """Trains by run.step, in rounds that are undone; one after the other without a device."""
    model = model_of(1, Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [torch.randn(4, WIDTH) for _ in range(3)]
    if device is None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for x in data:
                model(x).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values()), 0
    with hydra_ext.offload(
        model, optimizer, budget="auto", device=device, activations=None, checks=Checks(poison_hosts=True)
    ) as run:
        for _ in range(STEPS):
            run.step(data, lambda x: model(x).square().mean(), reduction="sum", round_size=3)
        refusals = run.report().refusals
    return list(model.state_dict().values()), refusals


def normed(device: Any) -> tuple[list[Tensor], int]:
    """Trains by a loop; its statistics change at each forward."""
    model = model_of(2, nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps() -> None:
        for _ in range(8 * STEPS):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if device is None:
        steps()
        return list(model.state_dict().values()), 0
    with hydra_ext.offload(
        model, optimizer, budget="auto", device=device, activations=None, checks=Checks(poison_hosts=True)
    ):
        steps()
    return list(model.state_dict().values()), 0


def test_a_round_that_is_undone_leaves_the_other_run_alone() -> None:
    state = torch.get_rng_state()
    plain = []
    for train in (counted, normed):
        torch.set_rng_state(state)
        plain.append(train(None))
    torch.set_rng_state(state)
    simulated = SimulatedDevice(to_device_bytes_per_second=20e6, to_host_bytes_per_second=20e6)
    device = hydra_ext.SharedDevice(simulated, budget=2 * 30_000)
    found = device.run(lambda: counted(device), lambda: normed(device))
    assert found[0][1] > 0, "no round was undone"
    assert device.report().switches > 2 * STEPS
    for (numbers, _), (same, _) in zip(plain, found, strict=True):
        assert all(map(torch.equal, numbers, same))
