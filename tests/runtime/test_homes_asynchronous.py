"""Blocks at home on a device whose compute ends late: nothing is read, added to or freed before it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice, optim
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, LAYERS, OPTIMIZERS, stack, state, train

ROOMY = 2**20


def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
    return train(model, optimizer) + train(model, optimizer)


def accumulating(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
    """Each gradient is summed, scaled, read on the way, and dropped without a step now and then."""
    seen: Outcome = []
    for step, batch in enumerate([*BATCHES, *BATCHES]):
        for part in batch.split(2):
            loss = model(part).pow(2).mean()
            seen.append(loss.detach().clone())
            loss.backward()
        seen.append(optim.clip_grad_norm_(model.parameters(), 1e-2))
        if step % 3 != 2:
            optimizer.step()
        optimizer.zero_grad()
    return seen


def returning(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
    """A block comes to the host right behind its update, and goes back."""
    seen: Outcome = []
    for step in range(4):
        seen += train(model, optimizer)
        weight = model[step % LAYERS].weight
        seen.append(weight.detach().clone())
        seen.append(
            optimizer.state[weight]["exp_avg" if "exp_avg" in optimizer.state[weight] else "momentum_buffer"].clone()
        )
    return seen


WORKS: dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], Outcome]] = {
    "loop": loop,
    "accumulating": accumulating,
    "returning": returning,
}


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 21))])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_homes_wait_for_what_the_device_still_does(name: str, work: str, seed: int) -> None:
    plain, model = stack(), stack()
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    expected = WORKS[work](plain, theirs)
    device = SimulatedDevice(asynchronous=True, seed=seed)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, ours, budget=ROOMY, blocks=list(model), device=device, checks=checks) as run:
        assert_same(expected, WORKS[work](model, ours))
        assert run.core.homes.statistics.settled >= LAYERS
        assert (run.core.homes.statistics.returned > 0) is (work == "returning")
    assert_same(state(plain, theirs), state(model, ours))
