"""How high strips are: what they compute twice is little, and what they take is reckoned before it is taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hydra_ext
from hydra_ext import tiled
from hydra_ext.tiled.devices import SimulatedStrips
from hydra_ext.tiled.geometry import TransposedWindow, Window, strips
from hydra_ext.tiled.operators.kernels import ConvolutionBytes
from hydra_ext.tiled.run import TiledRun
from support.strips import outcome

GIB = 2**30
HEIGHT = 16_000

# Of gigapixel networks: channels in and out, kernel, stride, whether transposed.
WIDE = [(3, 3, 5, 1, False), (3, 3, 7, 4, False), (14, 7, 3, 1, False), (3, 3, 7, 4, True)]


def times_computed(kind: tuple[int, int, int, int, bool], budget: int, width: int) -> tuple[float, float]:
    """How often a row of the source is loaded forward, and computed backward; of maps that have no memory."""
    inside, outside, kernel, stride, transposed = kind
    scale = stride if transposed else 1
    source = torch.empty(1, inside, HEIGHT // scale, width // scale, device="meta")
    weight = torch.empty(outside, inside, kernel, kernel, device="meta")
    shape = {"height": source.shape[2], "reach": kernel - 1, "stride": stride, "padding": kernel // 2}
    window: Window | TransposedWindow
    if transposed:
        window = TransposedWindow(**shape, extra=stride - 1)
        result = F.conv_transpose2d(source, weight, None, stride, kernel // 2, stride - 1)
    else:
        window = Window.of_convolution(**shape)
        result = F.conv2d(source, weight, None, stride, kernel // 2)
    takes = ConvolutionBytes(source, result, weight, transposed, plain=True, in_columns=True)
    run = TiledRun(SimulatedStrips(budget, hydra_ext.SimulatedDevice()), budget=budget, rows=None)
    rows = run.rows(result.shape[2], lambda rows: takes.forward(*window.forward_most(rows)))
    own_rows = run.rows(source.shape[2], lambda rows: takes.backward(*window.backward_most(rows)))
    assert takes.forward(*window.forward_most(rows)) <= budget // 2
    assert takes.backward(*window.backward_most(own_rows)) <= budget // 2
    loaded = sum(window.forward(wanted).load.count for wanted in strips(result.shape[2], rows))
    computed = sum(window.backward(own).input.count for own in strips(source.shape[2], own_rows))
    return loaded / source.shape[2], computed / source.shape[2]


@pytest.mark.every_case
@pytest.mark.parametrize("width", [16_384, 64_000])
@pytest.mark.parametrize("budget", [1 * GIB, 8 * GIB])
@pytest.mark.parametrize("kind", WIDE)
def test_halos_are_a_small_part_of_what_is_computed(
    kind: tuple[int, int, int, int, bool], budget: int, width: int
) -> None:
    forward, backward = times_computed(kind, budget, width)
    bound_by_the_budget = width == 64_000 and budget == GIB
    assert forward <= 1.25
    assert backward <= (1.45 if bound_by_the_budget else 1.25)


def test_where_no_kernel_writes_columns_none_are_reckoned() -> None:
    """Of bf16, whose maps have no blocks of channels: rows of both maps and their copies, and the weight twice."""
    source, result, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, 16, 40, 50), (1, 32, 40, 50), (32, 16, 3, 3))
    )
    takes = ConvolutionBytes(source, result, weight, transposed=False, plain=True, in_columns=False)
    of_source, of_result = 2 * 16 * 50, 2 * 32 * 50
    assert takes.forward(5, 3) == 2 * (5 * of_source + 3 * of_result + weight.nbytes)
    of_gradient = 3 * weight.nbytes + 2 * 8 * weight.numel()
    assert takes.backward(5, 3) == 2 * (2 * 5 * of_source + 3 * of_result) + of_gradient


# Dtype, whether transposed, kernel, stride, groups, dilation, batch.
SHAPES = [
    (dtype, transposed, kernel, stride, groups, dilation, batch)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for transposed in (False, True)
    for kernel, stride, groups, dilation, batch in [
        (1, 1, 1, 1, 1),
        (1, 2, 1, 1, 1),
        (2, 2, 1, 1, 1),
        (3, 1, 1, 1, 1),
        (3, 1, 4, 1, 2),
        (3, 1, 8, 1, 1),
        (3, 1, 1, 3, 1),
        (5, 2, 2, 1, 1),
        (7, 4, 1, 1, 1),
        (7, 1, 1, 1, 2),
    ]
]


@pytest.mark.parametrize(
    ("dtype", "transposed", "kernel", "stride", "groups", "dilation", "batch"), SHAPES, ids=lambda value: str(value)
)
def test_what_is_reckoned_to_fit_fits(
    dtype: torch.dtype, transposed: bool, kernel: int, stride: int, groups: int, dilation: int, batch: int
) -> None:
    """In every budget in which strips of one row fit, strips as high as that budget allows do."""
    height = 12 if transposed else 30
    source, weight = torch.randn(batch, 8, height, 256).to(dtype), torch.randn(8, 8 // groups, kernel, kernel).to(dtype)

    def convolve(source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if transposed:
            return F.conv_transpose2d(source, weight, None, stride, kernel // 2, 0, groups, dilation)
        return F.conv2d(source, weight, None, stride, kernel // 2, dilation, groups)

    def report(budget: int, rows: int | None) -> tiled.TiledReport:
        with tiled.strips(budget=budget, rows=rows, device="simulated") as run:
            outcome(convolve, [source, weight])
        return run.report()

    smallest = report(GIB, rows=1).peak_bytes
    for quarters in (4, 5, 6, 8, 11, 16):
        assert report(smallest * quarters // 4, rows=None).peak_bytes <= smallest * quarters // 4


def test_strips_are_lower_where_kernels_take_more_than_is_reckoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reckoning of nothing chooses one strip of the whole map, which the budget has no room for."""
    source, weight = torch.randn(1, 8, 30, 256), torch.randn(8, 8, 3, 3)

    def convolve(source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(source, weight, None, 1, 1)

    with tiled.strips(budget=GIB, rows=4, device="simulated") as run:
        expected = outcome(convolve, [source, weight])
    budget = 3 * run.report().peak_bytes // 2
    for name in ("forward", "backward"):
        monkeypatch.setattr(ConvolutionBytes, name, lambda *_rows: 0)
    with tiled.strips(budget=budget, device="simulated") as run:
        seen = outcome(convolve, [source, weight])
    assert run.report().strips > 2 * run.report().operations
    assert run.report().peak_bytes <= budget
    torch.testing.assert_close(seen.value, expected.value)
    torch.testing.assert_close(seen.gradients, expected.gradients, rtol=1e-4, atol=1e-3)
