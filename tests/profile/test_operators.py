"""Bytes of kernels beside operands and results are those that torch's allocator has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hydra_ext.profile.operators import workspace_of

NOTES = 12 * 1024  # bytes that oneDNN takes beside copies
CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def taken(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that are there while something runs, and not after it; with its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        made = work()
    assert seen.profiler is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most - now, made


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(
    ("images", "side", "kernel", "stride", "is_transposed"),
    [
        (4, 16, 3, 1, False),
        (4, 16, 1, 1, False),  # has no columns and no copies
        (1, 8, 3, 1, False),  # a small map has columns
        (4, 16, 2, 2, True),
    ],
)
def test_convolutions(
    layout: torch.memory_format, images: int, side: int, kernel: int, stride: int, is_transposed: bool
) -> None:
    x = torch.randn(images, 64, side, side).contiguous(memory_format=layout)
    weight = torch.randn(64, 64, kernel, kernel).contiguous(memory_format=layout)
    how = ([stride] * 2, [kernel // 2 if stride == 1 else 0] * 2, [1, 1], is_transposed, [0, 0], 1)
    forward = (x, weight, None, *how)
    real, y = taken(lambda: CONVOLUTION(*forward))
    copy = x.nbytes + weight.nbytes  # not all kernels of oneDNN make one
    assert real - NOTES <= workspace_of(CONVOLUTION, forward, y) <= real + copy
    gradient = torch.randn_like(y)
    for wanted in ([True, True, False], [False, True, False], [True, False, False]):
        backward = (gradient, x, weight, [0], *how, wanted)
        real, made = taken(lambda backward=backward: BACKWARD(*backward))
        assert real - NOTES <= workspace_of(BACKWARD, backward, made) <= real + copy, wanted


def test_other_operators_take_nothing() -> None:
    x = torch.randn(8, 8)
    assert workspace_of(torch.ops.aten.mm.default, (x, x), x @ x) == 0
