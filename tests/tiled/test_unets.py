"""Whole networks: the stand-ins for the gigapixel U-Net, in strips next to at once and in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext import tiled
from support.models.unets import example
from support.strips import assert_no_farther

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
HEIGHT, WIDTH = 320, 192


def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (1, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def dense(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mean, std = (torch.tensor(values, dtype=dtype).view(-1, 1, 1) for values in (MEAN, STD))
    return pixels().to(dtype).div(255).sub(mean).div(std)


def made(kind: str) -> nn.Module:
    torch.manual_seed(2)
    return example.MODELS[kind]()


def trained(model: nn.Module, image: torch.Tensor, steps: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    target = example.bright(pixels()).to(image.dtype)
    losses = []
    for _ in range(steps):
        losses.append(example.step(model, image, target).item())
        optimizer.step()
    return losses, [parameter.grad for parameter in model.parameters()]


def test_both_networks_have_4492_numbers() -> None:
    statistics = sum(buffer.numel() for name, buffer in made("g1").named_buffers() if "running" in name)
    assert sum(parameter.numel() for parameter in made("g1").parameters()) + statistics == 4492
    assert sum(parameter.numel() for parameter in made("g2").parameters()) == 4492


@pytest.mark.parametrize("rows", [16, 50, 100])
@pytest.mark.parametrize("kind", ["g1", "g2"])
def test_loss_and_gradients(kind: str, rows: int) -> None:
    model = made(kind)
    exact, exact_gradients = trained(copy.deepcopy(model).double(), dense(torch.float64))
    plain, plain_gradients = trained(copy.deepcopy(model), dense())
    with tiled.strips(budget="1GiB", rows=rows, device="simulated"):
        losses, gradients = trained(model, tiled.image(pixels(), mean=MEAN, std=STD))
    assert losses == plain  # to the last bit
    assert abs(losses[0] - exact[0]) < 2**-20
    assert_no_farther(gradients, plain_gradients, exact_gradients)


@pytest.mark.parametrize("kind", ["g1", "g2"])
def test_maps_and_running_statistics_have_the_bits_of_the_whole_image(kind: str) -> None:
    model, twin = made(kind), made(kind)
    with tiled.strips(budget="1GiB", rows=50, device="simulated"):
        results = model(tiled.image(pixels(), mean=MEAN, std=STD))
    assert torch.equal(results, twin(dense()))
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["g1", "g2"])
def test_training_goes_the_same_way(kind: str) -> None:
    model, twin = made(kind), made(kind)
    plain, _ = trained(twin, dense(), steps=4)
    with tiled.strips(budget="1GiB", rows=48, device="simulated"):
        losses, _ = trained(model, dense(), steps=4)
    torch.testing.assert_close(losses, plain, rtol=2e-5, atol=0)


def test_an_image_of_bytes_has_the_bits_of_the_same_in_numbers() -> None:
    results = []
    for image in (dense(), tiled.image(pixels()[0], mean=MEAN, std=STD)):
        with tiled.strips(budget="1GiB", rows=40, device="simulated"):
            results.append(trained(made("g2"), image))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def twice(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    """Two backwards through one graph."""
    loss = model(image).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def of_the_input(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    image = image.requires_grad_()
    model(image).square().sum().backward()
    return [image.grad]


def recomputed(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    """What is kept of the network is its input."""
    checkpoint(model, image, use_reentrant=False).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def evaluated(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        first = model(image)
    with torch.inference_mode():
        return [first, model(image).clone()]


@pytest.mark.parametrize("way", [twice, of_the_input, recomputed, evaluated])
@pytest.mark.parametrize("kind", ["g1", "g2"])
def test_ways_to_use_a_network(kind: str, way: Callable[[nn.Module, torch.Tensor], list[torch.Tensor]]) -> None:
    exact = way(made(kind).double(), dense(torch.float64))
    plain = way(made(kind), dense())
    with tiled.strips(budget="1GiB", rows=48, device="simulated") as run:
        results = way(made(kind), dense())
    assert run.report().strips > run.report().operations
    assert_no_farther(results, plain, exact)


def test_a_common_unet() -> None:
    class Double(nn.Sequential):
        def __init__(self, inside: int, outside: int) -> None:
            layers = [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
            super().__init__(*layers)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.lower, self.lowest = Double(3, 8), Double(8, 16), Double(16, 16)
            self.up, self.out = Double(32, 8), nn.Conv2d(16, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.inside(x)
            second = self.lower(F.max_pool2d(first, 2))
            x = F.interpolate(self.lowest(F.avg_pool2d(second, 2)), scale_factor=2, mode="bilinear")
            x = F.interpolate(self.up(torch.cat([x, second], 1)), scale_factor=2)
            return self.out(torch.cat([x, first], 1))

    def run(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
        F.cross_entropy(model(image), pixels()[:, 0].long() % 2).backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(3)
    model = UNet()
    exact, plain = run(copy.deepcopy(model).double(), dense(torch.float64)), run(copy.deepcopy(model), dense())
    with hydra_ext.tiled.strips(budget="1GiB", rows=30, device="simulated"):
        gradients = run(model, dense())
    assert_no_farther(gradients, plain, exact)
