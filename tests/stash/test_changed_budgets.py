"""A stash's budget can change at any time: between steps, while a graph is alive, and from another thread."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hydra_ext import _C, SimulatedDevice
from hydra_ext.runtime.placement import devices
from support.stash.stashed import assert_same, gradients

ROWS, WIDTH, LAYERS = 64, 128, 6
SAVED = 4 * ROWS * WIDTH  # bytes of one interval; a layer saves two
ALL = 64 * SAVED
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2], ids=["synchronous", "late-1", "late-2"])


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]), torch.randn(
        ROWS, WIDTH
    )


def make_stash(seed: int | None, budget: int | None) -> _C.Stash:
    device = SimulatedDevice() if seed is None else SimulatedDevice(asynchronous=True, seed=seed)
    place = devices.choose(device)
    return _C.Stash(backend=place.make_backend(), arena=place.make_arena(), device=place.device, budget=budget)


def step(stash: _C.Stash, model: nn.Module, x: Tensor) -> list[Tensor]:
    return gradients(model, lambda: model(x).square().mean(), saved_tensors_hooks(stash.pack, stash.unpack))


@SEEDS
def test_each_step_has_the_budget_that_it_was_given(seed: int | None) -> None:
    model, x = make()
    expected = gradients(model, lambda: model(x).square().mean())
    stash = make_stash(seed, None)
    assert_same(step(stash, model, x), expected)
    moved = []
    for budget in (ALL, 3 * SAVED, 0, ALL, None, ALL):
        stash.set_budget(budget)
        before = stash.statistics().to_host_bytes
        assert_same(step(stash, model, x), expected)
        moved.append(stash.statistics().to_host_bytes - before)
        done = stash.last_pass()
        assert done is not None
        assert done.peak_bytes <= (ALL if budget is None else budget)
    assert moved[0] == moved[3] == moved[5] == 0
    assert 0 < moved[1] <= moved[2] == moved[4]
    assert stash.statistics().held_bytes == stash.statistics().host_bytes == 0


@pytest.mark.every_case
@SEEDS
@pytest.mark.parametrize("budget", [0, 2 * SAVED, None])
def test_what_is_above_a_lower_budget_leaves_at_once(seed: int | None, budget: int | None) -> None:
    model, x = make()
    expected = gradients(model, lambda: model(x).square().mean())
    stash = make_stash(seed, ALL)
    assert_same(step(stash, model, x), expected)  # from the second pass on nothing leaves that fits
    with saved_tensors_hooks(stash.pack, stash.unpack):
        loss = model(x).square().mean()
    assert stash.statistics().held_bytes > LAYERS * SAVED
    stash.set_budget(budget)
    assert stash.statistics().held_bytes <= (2 * SAVED if budget is None else budget)
    loss.backward()
    assert_same([loss.detach(), *(parameter.grad for parameter in model.parameters())], expected)  # type: ignore[list-item]


@pytest.mark.cases(1)
@SEEDS
def test_another_thread_may_change_it(seed: int | None) -> None:
    model, x = make()
    expected = gradients(model, lambda: model(x).square().mean())
    stash = make_stash(seed, ALL)
    draws, ended = random.Random(seed), threading.Event()

    def change() -> None:
        while not ended.is_set():
            stash.set_budget(draws.choice([None, 0, SAVED, 5 * SAVED, ALL]))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            assert_same(step(stash, model, x), expected)
    finally:
        ended.set()
        thread.join()
    assert stash.statistics().held_bytes == stash.statistics().host_bytes == 0
