"""What strips cannot do, or are asked wrongly, is refused by name."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hydra_ext
from hydra_ext import tiled
from hydra_ext.errors import InvalidArgument, InvalidBudget, InvalidDevice, StateError, UnsupportedOperation

pytestmark = pytest.mark.every_case


def image(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 3, 40, 12, dtype=dtype)


REFUSED = {
    "aten.mm.default": lambda x: x.flatten(0, 2) @ torch.ones(12, 2),
    "aten.cumsum.default": lambda x: x.cumsum(2),
    "aten.native_group_norm.default": lambda x: F.group_norm(x, 3),
    "aten._softmax.default": lambda x: F.softmax(x, dim=2),
    "aten._adaptive_avg_pool2d.default": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "aten.upsample_nearest2d.default": lambda x: F.interpolate(x, size=(50, 12)),
    "aten.upsample_bilinear2d.default": lambda x: F.interpolate(x, scale_factor=3, mode="bilinear"),
    "aten.upsample_bicubic2d.default": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "aten.add.out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_cannot_be_made_in_strips_is_named(operation: str) -> None:
    source = image()
    with tiled.strips(budget="4KiB", rows=10, device="simulated") as run:
        with pytest.raises(UnsupportedOperation, match=operation.replace(".", r"\.")) as error:
            REFUSED[operation](source)
        assert error.value.operation == operation
    assert run.report().operations == 0


def test_corners_that_are_aligned_are_refused() -> None:
    with (
        tiled.strips(budget="1GiB", rows=10, device="simulated"),
        pytest.raises(UnsupportedOperation, match="align_corners=False"),
    ):
        F.interpolate(image(), scale_factor=2, mode="bilinear", align_corners=True)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("factor", [1.02, 2.01, 4.02])
def test_factors_that_are_rounded_to_whole_rows_are_refused(mode: str, factor: float) -> None:
    source = image()
    rows = int(40 * factor)
    assert rows % 40 == 0
    gradient = torch.randn(1, 3, rows, int(12 * factor))
    backward = getattr(torch.ops.aten, f"upsample_{mode}2d_backward").default
    corners = [False] if mode == "bilinear" else []
    with tiled.strips(budget="1GiB", rows=10, device="simulated") as run:
        with pytest.raises(UnsupportedOperation, match=f"factor of {factor}"):
            F.interpolate(source, scale_factor=factor, mode=mode)
        with pytest.raises(UnsupportedOperation, match=f"factor of {factor}"):
            backward(gradient, gradient.shape[2:], source.shape, *corners, factor, factor)
        F.interpolate(source, scale_factor=factor, mode=mode, recompute_scale_factor=True)
        F.interpolate(source, scale_factor=(2.0, factor), mode=mode)
    assert run.report().operations == 2


def test_what_is_smaller_than_a_strip_is_left_alone() -> None:
    source = image()
    with tiled.strips(budget="1GiB", device="simulated") as run:
        assert torch.equal(source.cumsum(2), torch.cumsum(source, 2))
        torch.optim.SGD([torch.zeros(3, requires_grad=True)]).step()
    assert run.report().operations == 0


def test_wrong_shapes_are_torch_s_to_refuse() -> None:
    with tiled.strips(budget="1GiB", rows=10, device="simulated"):
        with pytest.raises(RuntimeError, match="channel"):
            F.conv2d(image(), torch.zeros(3, 2, 3, 3))
        with pytest.raises(RuntimeError, match="Float"):
            F.conv2d(image(), torch.zeros(3, 3, 3, 3, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="broadcast"):
            image() + torch.zeros(1, 3, 41, 12)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget": "much"}, InvalidBudget, "'8GiB'"),
        ({"budget": "1GiB", "rows": 0}, InvalidArgument, "rows=0"),
        ({"budget": "1GiB", "rows": 2.5}, InvalidArgument, r"rows=2\.5"),
        ({"budget": "1GiB", "device": "tpu"}, InvalidDevice, "'tpu'"),
        ({"budget": "1GiB", "device": "cpu"}, InvalidDevice, "'simulated'"),
        ({"budget": "1GiB", "device": "cuda:99"}, InvalidDevice, "finds"),
        ({"budget": "1GiB", "device": hydra_ext.SimulatedDevice(asynchronous=True)}, InvalidArgument, "asynchronous"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), tiled.strips(**arguments):
        pass


def test_a_context_is_entered_once() -> None:
    context = tiled.strips(budget="1GiB", device="simulated")
    with context:
        pass
    with pytest.raises(StateError, match="make a new one"), context:
        pass


def test_a_context_inside_another_is_refused_and_on_another_thread_it_is_not() -> None:
    results = []

    def beside() -> None:
        with tiled.strips(budget="1GiB", rows=10, device="simulated"):
            results.append(torch.ones(1, 1, 40, 4) * 2)

    with tiled.strips(budget="1GiB", rows=10, device="simulated") as run:
        inner = tiled.strips(budget="1GiB", rows=5, device="simulated")
        with pytest.raises(StateError, match="leave that first"), inner:
            pass
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        torch.ones(1, 1, 40, 4) * 2
    assert (run.report().operations, run.report().strips) == (1, 4)
    assert torch.equal(results[0], torch.full((1, 1, 40, 4), 2.0))
    with inner as run:
        torch.ones(1, 1, 40, 4) * 2
    assert run.report().strips == 8


@pytest.mark.parametrize("rows", [10, 100])
def test_parameters_that_are_offloaded_are_refused(rows: int) -> None:
    model = torch.nn.Conv2d(3, 3, 3)
    with (
        hydra_ext.offload(model, budget="1MiB", device="simulated"),
        tiled.strips(budget="1GiB", rows=rows, device="simulated") as run,
    ):
        with pytest.raises(UnsupportedOperation, match=r"a parameter of hydra_ext\.offload.*out of") as error:
            model(image())
        model.weight.detach().clone()
    assert error.value.operation == "aten.convolution.default"
    assert run.report().operations == 0


def test_tensors_on_another_device_are_refused_next_to_a_map() -> None:
    elsewhere = torch.zeros(3, 3, 3, 3, device="meta")
    with tiled.strips(budget="1GiB", rows=10, device="simulated") as run:
        with pytest.raises(UnsupportedOperation, match=r"a tensor on meta.*on the CPU"):
            F.conv2d(image(), elsewhere)
        with pytest.raises(UnsupportedOperation, match=r"a tensor on meta.*on the CPU"):
            image() * elsewhere[:1, :, :1, :1]
        assert F.conv2d(torch.zeros(1, 3, 40, 12, device="meta"), elsewhere).device.type == "meta"
        assert image().to("meta").device.type == "meta"
    assert run.report().operations == 0


OVERLAPPING = {
    "expanded": lambda x: x[:, :1].expand(1, 3, 40, 12).add_(1),
    "in every row": lambda x: x[:, :, :1].expand(1, 3, 40, 12).mul_(x.clone()),
    "a row further": lambda x: x[:, :, 1:].add_(x[:, :, :-1]),
    "a row less": lambda x: x[:, :, :-1].add_(x[:, :, 1:]),
    "by one of its rows": lambda x: x.mul_(x[:, :, :1]),
    "upside down": lambda x: x.view(-1)[:1200].view(1, 1, 100, 12).sub_(x.view(-1)[240:].view(1, 1, 100, 12)),
    "of 16 bits": lambda x: (y := x.bfloat16())[..., 1:].add_(y[..., :-1]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_operations_in_place_on_what_they_read_elsewhere_are_refused(name: str) -> None:
    source = image()
    before = source.clone()
    with tiled.strips(budget="1GiB", rows=10, device="simulated") as run:
        with pytest.raises(UnsupportedOperation, match=r"call \.clone\(\)"):
            OVERLAPPING[name](source)
        assert torch.equal(source, before)
    assert run.report().operations == 0


APART = {
    "itself": lambda x: x.mul_(x),
    "a view of itself": lambda x: x.mul_(x.view(3, 40, 12)[None]),
    "rows in turn": lambda x: x[:, :, ::2].add_(x[:, :, 1::2]),
    "columns in turn": lambda x: x[..., ::2].add_(x[..., 1::2]),
    "channels": lambda x: x[:, :1].mul_(x[:, 1:2]).sub_(x[:, 2:]),
    "upper and lower half": lambda x: x[:, :, :20].add_(x[:, :, 20:]),
    "by a column": lambda x: x[..., 1:].mul_(x[..., :1]),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3).add_(1),
}


@pytest.mark.parametrize("name", APART)
def test_operations_in_place_on_what_they_do_not_read_elsewhere_are_made(name: str) -> None:
    source = torch.randn(2, 3, 40, 12) if name != "a view of itself" else image()
    expected = APART[name](source.clone())
    with tiled.strips(budget="1GiB", rows=7, device="simulated") as run:
        assert torch.equal(APART[name](source.clone()), expected)
    assert run.report().strips > run.report().operations > 0


def test_an_error_inside_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), tiled.strips(budget="1KiB", rows=1, device="simulated") as run:
        raise ZeroDivisionError
    F.conv2d(image(), torch.zeros(3, 3, 3, 3))
    assert run.report().operations == 0


@pytest.mark.parametrize(
    ("pixels", "options", "message"),
    [
        (torch.zeros(1, 3, 4, 4), {}, "uint8"),
        (torch.zeros(4, 4, dtype=torch.uint8), {}, r"\(C, H, W\)"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), {"mean": (0.0, 0.0)}, "3 channels"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), {"std": (1.0, 0.0, 1.0)}, "has a 0"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), {"dtype": torch.int32}, "floating"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), {"dtype": "float32"}, "floating"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8).numpy(), {}, "from_numpy"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), {"std": (1e-50,)}, "has a 0 in torch.float32"),
        *(
            (torch.zeros(3, 4, 4, dtype=torch.uint8), {name: values}, f"{name}=.*finite numbers")
            for name in ("mean", "std")
            for values in (0.5, None, "123", ("much",), (math.nan,), (1.0, math.inf, 1.0), (10**400,), (1e300,), [[1]])
        ),
    ],
)
def test_images(pixels: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tiled.image(pixels, **options)


def test_an_image_of_bytes_outside_strips_is_refused() -> None:
    photograph = tiled.image(torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert "(1, 3, 8, 8)" in repr(photograph)
    with pytest.raises(UnsupportedOperation, match="inside 'with"):
        photograph + 1
    with tiled.strips(budget="1GiB", rows=2, device="simulated"), pytest.raises(UnsupportedOperation):
        torch.cat([photograph, photograph])


@pytest.mark.parametrize("dimensions", [3, 4])
def test_bytes_that_change_before_backward_raise(dimensions: int) -> None:
    pixels = torch.zeros(1, 3, 40, 8, dtype=torch.uint8)
    pixels = pixels if dimensions == 4 else pixels[0]
    weight = torch.ones(1, 3, 3, 3, requires_grad=True)
    with tiled.strips(budget="1GiB", rows=10, device="simulated"):
        loss = F.conv2d(tiled.image(pixels), weight).sum()
        pixels.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        F.conv2d(tiled.image(pixels), weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 38 * 6 / 255))


def test_an_image_of_bytes_smaller_than_a_strip_has_numbers_too() -> None:
    pixels = torch.arange(3 * 8 * 8, dtype=torch.uint8).view(1, 3, 8, 8)
    numbers = pixels.float().div(255).sub(0.5).div(0.25)
    with tiled.strips(budget="1GiB", device="simulated"):
        photograph = tiled.image(pixels, mean=(0.5,), std=(0.25,))
        assert torch.equal(photograph * 2 + 1, numbers * 2 + 1)
        assert torch.equal(F.relu(photograph), F.relu(numbers))
        assert torch.equal(F.mse_loss(photograph, numbers), torch.tensor(0.0))
        assert torch.equal(F.softmax(photograph, dim=1), F.softmax(numbers, dim=1))


def test_bytes_of_inference_mode_make_an_image() -> None:
    with torch.inference_mode():
        photograph = tiled.image(torch.full((3, 40, 8), 255, dtype=torch.uint8))
        with tiled.strips(budget="1GiB", rows=10, device="simulated"):
            assert torch.equal(photograph * 2, torch.full((1, 3, 40, 8), 2.0))
