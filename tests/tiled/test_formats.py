"""Maps lie in memory as in plain PyTorch: what may be viewed there may be viewed here, and kernels are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hydra_ext import tiled
from support.strips import Outcome, assert_equal, in_strips, outcome

LAST = torch.channels_last


def source() -> torch.Tensor:
    return torch.randn(2, 8, 90, 80, generator=torch.Generator().manual_seed(1))


def weight() -> torch.Tensor:
    return torch.randn(6, 8, 3, 3, generator=torch.Generator().manual_seed(2))


def assert_laid_out_alike(made: Outcome, expected: Outcome) -> None:
    assert made.value.stride() == expected.value.stride()
    for one, other in zip(made.gradients, expected.gradients, strict=True):
        assert one.stride() == other.stride()


def viewed(x: torch.Tensor) -> torch.Tensor:
    made = F.conv2d(x, weight()).permute(0, 2, 3, 1)
    return made.view(made.shape[0], -1) * 2  # of channels last no copy is needed


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "convolution": lambda x: F.conv2d(x, weight(), padding=1),
    "strided": lambda x: F.conv2d(x, weight(), stride=2),
    "transposed": lambda x: F.conv_transpose2d(x, weight().transpose(0, 1).contiguous(), padding=1),
    "max pooling": lambda x: F.max_pool2d(x, 2),
    "average pooling": lambda x: F.avg_pool2d(x, 3, stride=2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pointwise": lambda x: F.relu(x) * x + torch.ones(2, 8, 90, 80),
    "softmax": lambda x: F.softmax(x, dim=1),
    "cropped": lambda x: F.conv2d(x[:, :, 3:, :-5], weight()),
    "layer after layer": lambda x: F.conv2d(
        F.max_pool2d(F.conv2d(x, weight()[:, :, :1, :1]).relu(), 2), weight()[:, :6]
    ),
    "viewed": viewed,
}


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("name", OPERATIONS)
def test_channels_last(name: str, rows: int) -> None:
    given = [source().to(memory_format=LAST)]
    made, expected = in_strips(OPERATIONS[name], given, rows=rows), outcome(OPERATIONS[name], given)
    assert_laid_out_alike(made, expected)
    assert_equal(made, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_with_channels_last(dtype: torch.dtype) -> None:
    given = [source().to(dtype), weight().to(dtype).to(memory_format=LAST)]

    def convolve(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, by, padding=1)

    made, expected = in_strips(convolve, given, rows=17), outcome(convolve, given)
    assert_laid_out_alike(made, expected)
    assert torch.equal(made.value, expected.value)


def test_the_gradient_of_a_map_between_layers_lies_as_a_weight_with_channels_last() -> None:
    strides: list[tuple[int, ...]] = []

    def convolve(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        between = x.relu()
        between.register_hook(lambda gradient: strides.append(gradient.stride()))
        return F.conv2d(between, by, padding=1)

    given = [source(), weight().to(memory_format=LAST)]
    in_strips(convolve, given, rows=17)
    outcome(convolve, given)
    made, expected = strides
    assert made == expected
    assert expected[1] == 1  # channels come last


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation(training: bool) -> None:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, torch.zeros(8), torch.ones(8), training=training)

    given = [source().to(memory_format=LAST)]
    made, expected = in_strips(normalise, given, rows=17), outcome(normalise, given)
    assert_laid_out_alike(made, expected)
    assert torch.equal(made.value, expected.value)


def test_another_order_of_dimensions() -> None:
    given = [source().transpose(2, 3)]
    made, expected = in_strips(torch.relu, given, rows=17), outcome(torch.relu, given)
    assert_laid_out_alike(made, expected)
    assert_equal(made, expected)


def test_an_image_of_bytes_with_channels_last() -> None:
    pixels = torch.randint(0, 256, (2, 90, 80, 8), dtype=torch.uint8).permute(0, 3, 1, 2)
    expected = F.conv2d(pixels.float().div(255), weight())
    with tiled.strips(budget="1GiB", rows=17, device="simulated"):
        photograph = tiled.image(pixels)
        made = F.conv2d(photograph, weight())
    assert made.stride() == expected.stride()
    assert photograph.stride() == pixels.stride()
    assert torch.equal(made, expected)
