"""Layers that are frozen and thawed while they have gradients: the optimizer moves them, and the device follows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, OPTIMIZERS, stack, state

TIGHT, ROOMY = 60_000, 2**20
MOMENT = 2  # the step at which the layer changes


class ByData(torch.optim.Optimizer):
    """A rule of an older kind, whose writes no version counter shows; it moves one row of each weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.view(-1)[70:90].sub_(1.0)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "torch AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "by data": ByData,
}


def freeze(layer: nn.Module) -> None:
    layer.requires_grad_(False)


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, when: str) -> Outcome:
    seen: Outcome = []
    model[1].register_forward_pre_hook(lambda layer, _: freeze(layer) if inside else None)
    for step, batch in enumerate([*BATCHES, *BATCHES]):
        inside = when == "in its forward" and step == MOMENT
        loss = model(batch).pow(2).mean()
        seen.append(loss.detach().clone())
        loss.backward()
        if step == MOMENT and when == "before the step":
            model[1].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step == MOMENT and when == "after the step":
            model[1].requires_grad_(False)
        if step == 2 * MOMENT:
            model[1].requires_grad_(True)
    return seen


@pytest.mark.parametrize("budget", [TIGHT, ROOMY])
@pytest.mark.parametrize("when", ["before the step", "after the step", "in its forward"])
@pytest.mark.parametrize("name", MAKE)
def test_a_frozen_layer_that_the_optimizer_goes_on_moving(name: str, when: str, budget: int) -> None:
    plain = stack()
    model = copy.deepcopy(plain)
    theirs, ours = MAKE[name](plain.parameters()), MAKE[name](model.parameters())
    expected = train(plain, theirs, when)
    device = SimulatedDevice(host_memory_bytes_per_second=1e9)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, ours, budget=budget, blocks=list(model), device=device, checks=checks) as run:
        assert_same(expected, train(model, ours, when))
        assert run.report().windows > 0
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("budget", [118_000, ROOMY], ids=["all fit", "all at home"])
def test_a_frozen_bias_that_is_written_behind_a_step(budget: int) -> None:
    """The step moves the block's weight only; the bias is the user's to write, without a version."""
    plain = stack()
    model = copy.deepcopy(plain)

    def losses(model: nn.Sequential) -> Outcome:
        optimizer = hydra_ext.optim.SGD((layer.weight for layer in model), lr=1e-2)
        seen: Outcome = []
        for layer in model:
            layer.bias.requires_grad_(False)
        device = SimulatedDevice(host_memory_bytes_per_second=1e8)
        context = hydra_ext.offload(model, optimizer, budget=budget, blocks=list(model), device=device)
        with context if model is not plain else nullcontext():
            for batch in BATCHES:
                loss = model(batch).pow(2).mean()
                seen.append(loss.detach().clone())
                loss.backward()
                optimizer.step()
                model[3].bias.data[5] += 1.0
                optimizer.zero_grad()
        return seen

    assert_same(losses(plain), losses(model))
