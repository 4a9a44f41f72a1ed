"""What the device holds: it is enforced to the byte, grows with the strip and the width, not with the height."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import hydra_ext
from hydra_ext import tiled
from support.models.unets import example

MIB = 2**20


def peak(
    kind: str,
    height: int,
    width: int,
    *,
    rows: int | None,
    budget: int = 2**30,
    dtype: torch.dtype = torch.float32,
) -> tiled.TiledReport:
    torch.manual_seed(0)
    model = example.MODELS[kind]().to(dtype)
    pixels = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)
    with tiled.strips(budget=budget, rows=rows, device="simulated") as run:
        example.step(model, tiled.image(pixels, dtype=dtype), example.bright(pixels).to(dtype))
    return run.report()


# In fp32 a strip has 20,480 elements at least, for the bits of the whole map: on the lowest level of the first network
# these are more rows than here are asked for.
@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "dtype"), [("g1", torch.float64), ("g2", torch.float64), ("g2", torch.float32)])
def test_memory_grows_with_the_strip_not_with_the_image(kind: str, dtype: torch.dtype) -> None:
    low, high = (peak(kind, height, 128, rows=64, dtype=dtype) for height in (512, 2048))
    assert high.peak_bytes == low.peak_bytes
    assert peak(kind, 512, 128, rows=128, dtype=dtype).peak_bytes > 1.5 * low.peak_bytes


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", [4 * MIB, 16 * MIB])
@pytest.mark.parametrize("kind", [pytest.param("g1", marks=pytest.mark.full), "g2"])
def test_strips_are_as_high_as_the_budget_allows(kind: str, budget: int) -> None:
    report = peak(kind, 1024, 256, rows=None, budget=budget)
    assert budget / 5 < report.peak_bytes <= budget
    assert report.strips > report.operations


def test_maps_on_the_host_are_not_charged() -> None:
    # Each map of 7 channels is 28 MiB, a strip of it 448 KiB.
    report = peak("g2", 2048, 512, rows=32)
    assert report.peak_bytes < 6 * MIB
    assert report.to_host_bytes > 200 * MIB


def test_a_strip_that_does_not_fit_says_what_to_do() -> None:
    source, weight = torch.zeros(1, 4, 64, 1024), torch.zeros(4, 4, 9, 9)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"of the budget of .*aten\.convolution\.default.*budget="),
        tiled.strips(budget="64KiB", device="simulated"),
    ):
        F.conv2d(source, weight)


def test_nothing_stays_charged() -> None:
    with tiled.strips(budget="8MiB", rows=16, device="simulated") as run:
        made = F.conv2d(torch.zeros(1, 3, 200, 64), torch.zeros(3, 3, 3, 3)).relu()
        with run.device:
            held = run.device.load(torch.zeros(1000))
        before = run.report().peak_bytes
        for _ in range(100):
            made = made.relu()
    assert run.report().peak_bytes == before
    assert not hydra_ext._C.on_simulated_device(made)
    assert held.numel() == 1000


def test_bytes_moved_are_those_of_rows_and_halos() -> None:
    source, weight = torch.zeros(1, 3, 100, 64, dtype=torch.float64), torch.zeros(2, 3, 5, 5, dtype=torch.float64)
    with tiled.strips(budget="1GiB", rows=25, device="simulated") as run:
        F.conv2d(source, weight, padding=2)
    report = run.report()
    # Four strips of 25 rows; halos of 2 rows, at the ends of the image on one side only; the weight once.
    assert report.to_device_bytes == 8 * (3 * 64 * (100 + 6 * 2) + 2 * 3 * 25)
    assert report.to_host_bytes == 8 * 2 * 64 * 100
    assert (report.operations, report.strips) == (1, 4)


def test_a_link_with_a_speed_takes_its_time() -> None:
    device = hydra_ext.SimulatedDevice(to_device_bytes_per_second=1e6, to_host_bytes_per_second=1e6)
    begin = time.perf_counter()
    with tiled.strips(budget="1GiB", rows=50, device=device):
        torch.zeros(1, 1, 100, 250).relu()  # 100 kB each way
    assert time.perf_counter() - begin > 0.2


@pytest.mark.full
def test_a_gigapixel_step_under_a_gibibyte() -> None:
    report = peak("g2", 4096, 16384, rows=None)
    assert 2**26 < report.peak_bytes <= 2**30
