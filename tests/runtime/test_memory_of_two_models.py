"""Two models in contexts of their own whose parameters have the same memory, by `.data = ...`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import SimulatedDevice, optim
from support.benches import assert_same

WIDTH = 16
Made = tuple[nn.Sequential, torch.optim.Optimizer]

ROWS = 4096


def tied(kind: type[torch.optim.Optimizer], *, frozen: bool) -> tuple[Made, Made]:
    """Two models, an output layer of one with the embedding of the other: a step writes some rows of many."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH))
    second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, ROWS, bias=False))
    second[1].weight.data = first[0].weight.data
    second[1].weight.requires_grad_(not frozen)
    trained = [parameter for parameter in second.parameters() if parameter.requires_grad]
    return (first, kind(first.parameters(), lr=0.1)), (second, kind(trained, lr=1e-3))  # type: ignore[call-arg]


def train_both(first: Made, second: Made) -> list[torch.Tensor]:
    seen = []
    for token in range(4):
        output = second[0](first[0](torch.tensor([token % 2])))
        loss = output.pow(2).mean() + second[0](torch.ones(1, WIDTH)).pow(2).mean()
        loss.backward()
        for _, optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        seen += [loss.detach().clone(), second[0](torch.ones(1, WIDTH)).detach().clone()]
    return [*seen, first[0][0].weight.detach().clone(), second[0][1].weight.detach().clone()]


@pytest.mark.parametrize("budget", [5 * 2**20, 2**24])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", [optim.SGD, torch.optim.SGD])
def test_steps_of_one_context_are_seen_in_another(kind: type[torch.optim.Optimizer], frozen: bool, budget: int) -> None:
    expected = train_both(*tied(kind, frozen=frozen))
    first, second = tied(kind, frozen=frozen)
    with (
        hydra_ext.offload(*first, budget=budget, device=SimulatedDevice()) as of_first,
        hydra_ext.offload(*second, budget=budget, device=SimulatedDevice()) as of_second,
    ):
        assert_same(expected, train_both(first, second))
    assert min(of_first.report().windows, of_second.report().windows) >= 8
    torch.testing.assert_close(expected[-2], expected[-1], rtol=0.0, atol=0.0)
    assert expected[0] != expected[2]
