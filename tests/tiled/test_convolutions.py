"""Convolutions in strips: the halo for every shape, the bits of the whole map, gradients against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hydra_ext import tiled
from support.strips import assert_close, assert_equal, assert_no_farther, in_strips, outcome

SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "groups": st.integers(1, 2),
        "height": st.integers(2, 37),
        "width": st.integers(1, 9),
        "kernel": st.tuples(st.integers(1, 7), st.integers(1, 3)),
        "stride": st.tuples(st.integers(1, 5), st.integers(1, 2)),
        "padding": st.tuples(st.integers(0, 7), st.integers(0, 2)),
        "dilation": st.tuples(st.integers(1, 3), st.integers(1, 2)),
        "bias": st.booleans(),
        "rows": st.integers(1, 9),
    }
)


def tensors_for(
    shape: dict[str, Any], channels: tuple[int, int], weight_channels: tuple[int, int]
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(shape["batch"], channels[0], shape["height"], shape["width"]), (*weight_channels, *shape["kernel"])]
    sizes += [(channels[1],)] if shape["bias"] else []
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def assert_in_strips_as_at_once(function: Any, tensors: list[torch.Tensor], rows: int) -> None:
    try:
        expected = outcome(function, tensors)
    except RuntimeError:
        assume(False)
    with tiled.strips(budget="1GiB", rows=rows, device="simulated"):
        made = outcome(function, tensors)
    assert_close(made, expected)


@settings(deadline=None)
@given(SHAPES)
def test_any_convolution(shape: dict[str, Any]) -> None:
    groups = shape["groups"]
    tensors = tensors_for(shape, (2 * groups, 3 * groups), (3 * groups, 2))
    options = {name: shape[name] for name in ("stride", "padding", "dilation", "groups")}
    assert_in_strips_as_at_once(lambda *given: F.conv2d(*given, **options), tensors, shape["rows"])


@settings(deadline=None)
@given(SHAPES, st.tuples(st.integers(0, 4), st.integers(0, 1)))
def test_any_transposed_convolution(shape: dict[str, Any], extra: tuple[int, int]) -> None:
    groups = shape["groups"]
    tensors = tensors_for(shape, (2 * groups, 3 * groups), (2 * groups, 3))
    options = {name: shape[name] for name in ("stride", "padding", "dilation", "groups")}
    options["output_padding"] = extra
    assert_in_strips_as_at_once(lambda *given: F.conv_transpose2d(*given, **options), tensors, shape["rows"])


# Of the two stand-ins for the gigapixel network, and of common networks: channels in and out, kernel, stride.
KINDS = [
    (3, 3, 5, 1),
    (3, 3, 7, 4),
    (3, 1, 5, 1),
    (3, 7, 3, 1),
    (7, 8, 5, 4),
    (14, 7, 3, 1),
    (7, 1, 1, 1),
    (16, 32, 3, 2),
]


@pytest.mark.parametrize("rows", [16, 37, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_and_their_gradients_have_the_bits_of_the_whole_map(kind: tuple[int, ...], rows: int) -> None:
    inside, outside, kernel, stride = kind
    generator = torch.Generator().manual_seed(2)
    source = torch.randn(1, inside, 301, 233, generator=generator)
    weight = torch.randn(outside, inside, kernel, kernel, generator=generator)
    bias = torch.randn(outside, generator=generator)

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        return F.conv2d(*given, stride=stride, padding=kernel // 2)

    plain, made = outcome(convolve, [source, weight, bias]), in_strips(convolve, [source, weight, bias], rows=rows)
    assert torch.equal(made.value, plain.value)
    assert torch.equal(made.gradients[0], plain.gradients[0])
    exact = outcome(convolve, [source.double(), weight.double(), bias.double()])
    assert_no_farther(made.gradients[1:], plain.gradients[1:], exact.gradients[1:])


@pytest.mark.parametrize("height", [300, 301, 302])
@pytest.mark.parametrize("stride", [2, 3])
def test_kernels_of_one_with_a_stride_have_the_bits_of_the_whole_map(height: int, stride: int) -> None:
    # oneDNN has a kernel of its own for them where the stride divides the number of rows.
    generator = torch.Generator().manual_seed(9)
    source = torch.randn(1, 64, height, 96, generator=generator)
    weight = torch.randn(32, 64, 1, 1, generator=generator)

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        return F.conv2d(*given, stride=stride)

    made, plain = in_strips(convolve, [source, weight], rows=32), outcome(convolve, [source, weight])
    assert torch.equal(made.value, plain.value)
    assert torch.equal(made.gradients[0], plain.gradients[0])


@pytest.mark.parametrize("rows", [16, 37])
@pytest.mark.parametrize("kind", [(3, 3, 7, 4), (8, 7, 5, 4), (16, 8, 2, 2)])
def test_transposed_maps_have_the_bits_of_the_whole_map(kind: tuple[int, ...], rows: int) -> None:
    inside, outside, kernel, stride = kind
    generator = torch.Generator().manual_seed(3)
    source = torch.randn(1, inside, 150, 233, generator=generator)
    weight = torch.randn(inside, outside, kernel, kernel, generator=generator)
    extra = stride - 1 if kernel > stride else 0

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        padding = kernel // 2 if kernel > stride else 0
        return F.conv_transpose2d(given[0], given[1], stride=stride, padding=padding, output_padding=extra)

    plain, made = outcome(convolve, [source, weight]), in_strips(convolve, [source, weight], rows=rows)
    assert torch.equal(made.value, plain.value)
    assert torch.equal(made.gradients[0], plain.gradients[0])
    exact = outcome(convolve, [source.double(), weight.double()])
    assert_no_farther(made.gradients[1:], plain.gradients[1:], exact.gradients[1:])


def test_sums_over_strips_are_the_same_every_time() -> None:
    tensors = [torch.randn(1, 3, 200, 150), torch.randn(4, 3, 3, 3), torch.randn(4)]
    first, second = (in_strips(F.conv2d, tensors, rows=23) for _ in range(2))
    assert_equal(first, second)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_what_is_asked_for_is_made(wanted: tuple[bool, bool]) -> None:
    source, weight = torch.randn(1, 3, 60, 20, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = source.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1])
    F.conv2d(*leaves, bias).square().sum().backward()
    expected = [leaf.grad for leaf in (*leaves, bias)]
    for leaf in (*leaves, bias):
        leaf.grad = None
    with tiled.strips(budget="1GiB", rows=7, device="simulated"):
        F.conv2d(*leaves, bias).square().sum().backward()
    for leaf, other in zip((*leaves, bias), expected, strict=True):
        assert (leaf.grad is None) == (other is None)
        assert other is None or torch.allclose(leaf.grad, other, rtol=1e-12, atol=1e-12)


def test_a_map_beyond_32_bits() -> None:
    # 3 x 42,001 x 64,000 elements, each row with its own number; no memory of that size.
    source = torch.arange(42_001, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 3, -1, 64_000)
    assert source.numel() > 2**32
    weight = torch.ones(1, 3, 1, 1)
    with tiled.strips(budget="64MiB", rows=1, device="simulated"):
        made = F.conv2d(source, weight, stride=6_000)
    assert torch.equal(made, (18_000 * torch.arange(8.0)).view(1, 1, 8, 1).expand(1, 1, 8, 11))
