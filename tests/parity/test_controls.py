"""Controls: what the parity tests rest on does notice what it is there to notice."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext import Checks, offload
from support.models.zoo import FAMILIES, Family
from support.training import Recipe, build, build_optimizer, differences, plain_peak, train

GPT2 = FAMILIES["gpt2"]


def test_a_difference_in_the_last_bit_of_one_weight_is_found() -> None:
    runs = []
    for _ in range(2):
        model = build(GPT2, Recipe())
        optimizer = build_optimizer(model, Recipe())
        runs.append((train(model, optimizer, GPT2, Recipe(), steps=1), model, optimizer))
    assert differences(*runs) == []
    name, weight = next(iter(model.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(torch.inf))
    assert name in differences(*runs)
    optimizer.state[weight]["exp_avg"].view(-1)[0] += 1
    assert "optimizer state 0.exp_avg" in differences(*runs)


class _ReadsTheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.aside = (self.layer.weight,)  # where no window looks

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + F.linear(x, self.aside[0]).sum()


def test_a_weight_read_from_the_host_inside_a_window_shows_in_the_loss() -> None:
    model = _ReadsTheHost()
    with offload(model, budget="1MB", checks=Checks(poison_hosts=True)), torch.no_grad():
        assert model(torch.ones(2, 8)).isnan()
    with torch.no_grad():
        assert not model(torch.ones(2, 8)).isnan()


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def test_the_plain_peak_holds_one_gradient_at_a_time_and_no_weight() -> None:
    family = Family("chain", _Chain, lambda generator: {"x": torch.randn(1, 64, generator=generator)})
    activation, weight = 64 * 4, 64 * 64 * 4
    peak = plain_peak(family, Recipe())
    # Four layers' inputs at most, a few rows of backward, and the gradient that is about to leave.
    assert weight + activation <= peak <= weight + 10 * activation
