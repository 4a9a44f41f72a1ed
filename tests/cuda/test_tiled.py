"""Strips on a GPU, next to the same network there at once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from hydra_ext import tiled
from support.gpu import EMULATED
from support.models.unets import example

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def dense(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mean, std = (torch.tensor(values, dtype=dtype).view(-1, 1, 1) for values in (MEAN, STD))
    return pixels.to(dtype).div(255).sub(mean).div(std)


@pytest.mark.parametrize("kind", ["g1", "g2"])
def test_a_step_in_strips_agrees_with_one_at_once(kind: str) -> None:
    torch.manual_seed(0)
    model = example.MODELS[kind]()
    pixels = torch.randint(0, 256, (1, 3, 512, 384) if EMULATED else (1, 3, 1024, 768), dtype=torch.uint8)
    target = example.bright(pixels)
    on_gpu, exact = copy.deepcopy(model).cuda(), copy.deepcopy(model).double()
    plain_loss = example.step(on_gpu, dense(pixels, torch.float32).cuda(), target.cuda()).item()
    example.step(exact, dense(pixels, torch.float64), target.double())
    with tiled.strips(budget="1GiB", rows=100, device="cuda") as run:
        loss = example.step(model, tiled.image(pixels, mean=MEAN, std=STD), target).item()
    assert abs(loss - plain_loss) < 1e-6
    assert 0 < run.report().peak_bytes <= 2**30
    # Batch normalisation of single pictures amplifies rounding by a factor that differs from parameter to parameter, so
    # all gradients are compared together.
    made, plain, true = (
        torch.cat([p.grad.cpu().double().flatten() for p in network.parameters()]) for network in (model, on_gpu, exact)
    )
    assert (made - true).norm() <= 2 * (plain - true).norm() + true.norm() * 2.0**-24


def test_strips_arrive_whole_and_in_order() -> None:
    source = torch.randn(1, 3, 4000, 1000)
    with tiled.strips(budget="1GiB", rows=37, device="cuda"):
        made = F.relu(source * 2)
    assert torch.equal(made, F.relu(source * 2))


def test_the_memory_fraction_is_given_back() -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    with tiled.strips(budget="1GiB", device="cuda"):
        assert torch.cuda.get_per_process_memory_fraction() < before
    assert torch.cuda.get_per_process_memory_fraction() == before
