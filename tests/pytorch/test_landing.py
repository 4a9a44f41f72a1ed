"""Gradients that are added to a sum land in a few pieces of host memory, whatever their size: the same sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, Checks, SimulatedDevice
from support.benches import assert_same

WIDTH = 1200  # a weight's gradient is larger than a piece, and no multiple of one
PASSES = 3
PIECE = 4 * 2**20


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def batches() -> list[torch.Tensor]:
    return list(torch.randn(PASSES, 4, WIDTH, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as they are", "cast"])
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "behind compute"])
def test_sums_of_several_backwards_are_those_of_one_addition_each(dtype: torch.dtype | None, slow: bool) -> None:
    plain, model = build(), build()
    expected = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for batch in batches():
        gradients = torch.autograd.grad(plain(batch).pow(2).mean(), list(plain.parameters()))
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient if dtype is None else gradient.to(dtype)
    budget = 2 * 2**20 + 3 * 4 * WIDTH * (WIDTH + 1)
    device = SimulatedDevice(to_host_bytes_per_second=1e8 if slow else None)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, budget=budget, grad_dtype=dtype, device=device, checks=checks) as run:
        for batch in batches():
            model(batch).pow(2).mean().backward()
        assert run.report().windows > 0
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert_same(expected, found)


def test_more_gradients_take_no_more_memory_to_land_in() -> None:
    model = build()
    sizes = []
    with hydra_ext.offload(model, budget="64MiB", checks=Checks(poison_hosts=True)) as run:
        for batch in batches():
            model(batch).pow(2).mean().backward()
            sizes.append(run.core.memory.arena_bytes)
    assert sizes[1] - sizes[0] == 2 * PIECE  # one more than the lane has under way
    assert sizes[2] == sizes[1]


def test_a_piece_that_is_lost_on_the_way_is_told_and_the_sum_is_not_taken_for_whole() -> None:
    model = build()
    faults = _C.testing.FaultScript()
    to_host = _C.testing.Operation.TO_HOST
    with hydra_ext.offload(model, budget="64MiB", device=SimulatedDevice(faults=faults)):
        first, second, _ = batches()
        model(first).pow(2).mean().backward()
        faults.fail(to_host, 2)
        with pytest.raises(hydra_ext.errors.TransferError):
            model(second).pow(2).mean().backward()
        model.zero_grad()
        model(first).pow(2).mean().backward()
    again = build()
    again(first).pow(2).mean().backward()
    assert_same([p.grad for p in again.parameters()], [p.grad for p in model.parameters()])
