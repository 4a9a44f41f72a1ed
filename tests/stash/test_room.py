"""What the stash has on the device makes room for other allocations: feasibility grows with the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from support.stash.stashed import assert_empty, assert_same

LAYERS, WIDTH, ROWS = 24, 64, 512
SAVED = 4 * ROWS * WIDTH  # of one layer, for one microbatch
MICROBATCHES, STEPS = 4, 2
# What a step cannot do without: a layer's weights and their gradients, one layer on its way, and the values that are
# alive in a backward. The stash would like to hold an eighth of a pass of up to LAYERS * MICROBATCHES * SAVED bytes.
LEAST = 5 * SAVED + 60 * 1024
BUDGETS = [LEAST + step * SAVED for step in range(8)]

Loss = Callable[[Tensor], Tensor]


def make() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    return model, list(torch.randn(MICROBATCHES, ROWS, WIDTH))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], fn: Loss) -> None:
    for x in data:
        (fn(x) / len(data)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def plain() -> list[Tensor]:
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loop(model, optimizer, data, lambda x: model(x).square().mean())
    return [parameter.detach() for parameter in model.parameters()]


def trained(
    budget: int, activations: hydra_ext.Offload | hydra_ext.Compress, device: SimulatedDevice, *, rounds: bool
) -> tuple[list[Tensor], hydra_ext.Report]:
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    with hydra_ext.offload(
        model, optimizer, budget=budget, device=device, activations=activations, checks=Checks(poison_hosts=True)
    ) as run:
        for _ in range(STEPS):
            if rounds:
                run.step(data, fn)
            else:
                loop(model, optimizer, data, fn)
        return [parameter.detach() for parameter in model.parameters()], run.report()


@pytest.mark.cases(1)
@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
@pytest.mark.parametrize("seed", [None, 1, 2], ids=["synchronous", "late-1", "late-2"])
def test_every_budget_from_the_least_on_is_enough(seed: int | None, rounds: bool) -> None:
    expected = plain()
    device = SimulatedDevice() if seed is None else SimulatedDevice(asynchronous=True, seed=seed)
    for budget in BUDGETS if seed is None else BUDGETS[:2]:
        found, report = trained(budget, hydra_ext.Offload(), device, rounds=rounds)
        assert_same(found, expected)
        assert report.activations is not None
        assert report.activations.to_device_bytes > 0
        if budget == LEAST:  # little comes ahead only to be given up and brought again
            assert report.activations.to_device_bytes <= 1.4 * STEPS * MICROBATCHES * LAYERS * SAVED
        assert report.evictions > 0 or budget > LEAST
        assert_empty(report.activations)


def test_what_is_compressed_does_not_depend_on_the_room() -> None:
    policy = hydra_ext.Compress(error=1e-3)
    (roomy, _), (tight, report) = (
        trained(budget, policy, SimulatedDevice(), rounds=False) for budget in (64 * SAVED, 8 * SAVED)
    )
    assert_same(tight, roomy)
    assert report.activations is not None
    assert report.activations.compressed > 0


# ---- graphs that backward passes more than once ---------------------------------------------------------------------
def a_forward_between(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    model(x * 0.5).square().mean().backward()
    loss.backward()


def gradients_asked_for_twice(model: nn.Module, x: Tensor) -> None:
    loss, weights = model(x).square().mean(), list(model.parameters())
    torch.autograd.grad(loss, weights[: len(weights) // 2], retain_graph=True)
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient


PASSED_AGAIN = [a_forward_between, gradients_asked_for_twice]
WITH_GRADIENTS = LEAST + LAYERS * 20 * 1024  # those that are asked for stay until all are there


def passed_again(
    program: Callable[[nn.Module, Tensor], None],
    budget: int | None,
    *,
    make: Callable[[], tuple[nn.Module, list[Tensor]]] = make,
    **options: Any,
) -> list[Tensor]:
    """Trains, plainly or with a stash from which tensors leave only when an allocation finds no room."""
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for x in data[:2]:  # in the first one, all that is saved leaves at once
            program(model, x)
            optimizer.step()
            optimizer.zero_grad()

    if budget is None:
        steps()
        return [parameter.detach() for parameter in model.parameters()]
    with hydra_ext.offload(
        model,
        optimizer,
        budget=budget,
        device=SimulatedDevice(**options),
        activations=hydra_ext.Offload(),
        checks=Checks(poison_hosts=True),
    ) as run:
        assert run._saving is not None
        run._saving.set_room(2**30)
        steps()
        report = run.report().activations
        assert report is not None
        assert_empty(report)
        return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("program", PASSED_AGAIN)
def test_what_backward_has_read_makes_room_too(program: Callable[[nn.Module, Tensor], None]) -> None:
    expected = passed_again(program, None)
    assert_same(passed_again(program, WITH_GRADIENTS), expected)
    assert_same(passed_again(program, WITH_GRADIENTS + 9 * SAVED, asynchronous=True, seed=1), expected)


class Product(nn.Module):
    """Saves the thirds of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.up(x).view(3, -1, WIDTH).unbind(0)
        product: Tensor = first * second * third
        return product


def products() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*[Product() for _ in range(8)]), list(torch.randn(2, ROWS, WIDTH))


def an_evaluation_between(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model(torch.cat([x] * 4))  # takes 29 * SAVED
    loss.backward()


def test_all_that_was_read_from_one_storage_makes_room_too() -> None:
    """All that the first backward has read takes 32 * SAVED, 24 of them in such storages."""
    expected = passed_again(an_evaluation_between, None, make=products)
    for budget in (30 * SAVED, 40 * SAVED):
        assert_same(passed_again(an_evaluation_between, budget, make=products), expected)


# ---- transfers that are not waited for ------------------------------------------------------------------------------
SLOW = 8e6  # bytes/s: all that is saved takes some 0.4 s


class Stops(Exception):
    pass


def a_dropped_forward(model: nn.Module, x: Tensor) -> None:
    model(x)


def a_dropped_backward(model: nn.Module, x: Tensor) -> None:
    """Ends when the last layer's tensors are read, and others are on their way."""

    def stop(*_: object) -> None:
        raise Stops

    def stop_before(_layer: nn.Module, inputs: tuple[Tensor]) -> None:
        inputs[0].register_hook(stop)  # type: ignore[no-untyped-call]

    handle = model[-1].register_forward_pre_hook(stop_before)  # type: ignore[index]
    loss = model(x).square().mean()
    handle.remove()
    with pytest.raises(Stops):
        loss.backward()


@pytest.mark.parametrize(
    ("program", "link"),
    [(a_dropped_forward, "to_host_bytes_per_second"), (a_dropped_backward, "to_device_bytes_per_second")],
)
def test_what_a_dropped_graph_has_on_a_lane_makes_room(program: Callable[[nn.Module, Tensor], None], link: str) -> None:
    model, data = make()
    device = SimulatedDevice(**{link: SLOW})  # type: ignore[arg-type]
    budget = 8 * SAVED + 60 * 1024  # what the evaluation takes, and weights
    with hydra_ext.offload(model, budget=budget, device=device, activations=hydra_ext.Offload()):
        program(model, data[0])
        with torch.no_grad():
            model[0](torch.cat(data))  # type: ignore[index]
