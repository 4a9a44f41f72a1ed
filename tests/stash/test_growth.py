"""Passes that end before, or in, their backward leave nothing behind, however many: no bytes, no objects."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C
from hydra_ext.runtime.placement import devices
from support.stash.stashed import assert_empty

WARM_UP = 50
PYTHON_BYTES = 32  # a pass, of caches
X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))  # 2 KiB: more than what is left alone


class Layer(nn.Module):
    """Fails when it is asked to, in its so many-eth call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.fails_in = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).sin()
        if _failing[0] == 1:
            raise ValueError("asked for")
        _failing[0] -= 1
        return y.cos()


_failing = [0]  # not on the module: what is there is restored for the second call


class Pass:
    """One model with every policy, its stash, and what both are made of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Layer() for _ in range(3)])
        self.arenas: list[_C.HostArena] = []
        place = devices.choose("simulated")
        make_arena = place.make_arena

        def made() -> _C.HostArena:
            self.arenas.append(make_arena())
            return self.arenas[-1]

        place.make_arena = made  # type: ignore[method-assign]
        policies = {"": hydra_ext.Offload(), "1": hydra_ext.Keep(), "2": hydra_ext.Recompute()}
        self.stash = hydra_ext.stash(policies, model=self.model, device=place)

    def loss(self) -> Tensor:
        with self.stash:
            return self.model(X).square().sum()


def forward_alone(one: Pass) -> Callable[[], None]:
    def run() -> None:
        with one.stash:
            one.model(X)

    return run


def loss_deleted_later(one: Pass) -> Callable[[], None]:
    losses: deque[Tensor] = deque(maxlen=5)

    def run() -> None:
        losses.append(one.loss())
        if len(losses) == 5:
            losses.clear()

    return run


def error_in_backward(one: Pass) -> Callable[[], None]:
    def fail(_gradient: Tensor) -> None:
        raise ValueError("asked for")

    one.model[1].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)

    def run() -> None:
        loss = one.loss()
        with pytest.raises(ValueError, match="asked for"):
            loss.backward()
        one.model.zero_grad()

    return run


def error_in_a_call_that_is_made_again(one: Pass) -> Callable[[], None]:
    def run() -> None:
        loss = one.loss()
        _failing[0] = 1
        with pytest.raises(ValueError, match="asked for"):
            loss.backward()
        _failing[0] = 0
        one.model.zero_grad()

    return run


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.cases(1)
@pytest.mark.parametrize("passes", [300, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "way", [forward_alone, loss_deleted_later, error_in_backward, error_in_a_call_that_is_made_again]
)
def test_nothing_grows(way: Callable[[Pass], Callable[[], None]], passes: int) -> None:
    one = Pass()
    run = way(one)
    for _ in range(WARM_UP):
        run()
        one.stash.report()  # once the transfers under way have ended: how far they lag behind is no growth
    gc.collect()
    tensors, mapped = live_tensors(), one.arenas[0].mapped_bytes
    meter = _C.testing.Meter()
    tracemalloc.start()
    meter.begin()
    held = [0]
    try:
        for _ in range(2):
            for _ in range(passes // 2):
                run()
                one.stash.report()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        meter.end()
        tracemalloc.stop()
    report = one.stash.report()
    assert report.intervals > WARM_UP + passes
    assert_empty(report)
    assert live_tensors() <= tensors
    assert one.arenas[0].mapped_bytes <= mapped
    assert meter.ledger.in_use == 0
    # A table of the interpreter's that becomes too small does so once.
    assert min(after - before for before, after in itertools.pairwise(held)) < PYTHON_BYTES * passes // 2
