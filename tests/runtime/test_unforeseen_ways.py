"""Ways round the window and the hooks: what comes that way gives what plain PyTorch gives, or raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, Checks, SimulatedDevice
from hydra_ext.errors import ModelChanged
from support.benches import ROOMY, Outcome, assert_same
from support.runtime.leaving import beside

WIDTH = 64
BATCH = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
POISONED = Checks(poison_hosts=True)
Work = Callable[[nn.Module], Outcome]


@pytest.fixture(autouse=True)
def _nothing_charged_afterwards() -> Iterator[None]:
    yield
    _C.suspend_charging()


def stack(layers: int = 4, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def gradients(model: nn.Module) -> Outcome:
    return ["none" if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(work: Work, build: Callable[[], nn.Module] = stack) -> None:
    """Plain and offloaded, the latter with a way home so slow that whatever does not wait for it is found out."""
    plain = work(build())
    model = build()
    device = SimulatedDevice(to_host_bytes_per_second=1e6)
    with hydra_ext.offload(model, budget=ROOMY, device=device, checks=POISONED) as run:
        offloaded = work(model)
        assert run.report().windows > 0
        assert run.core.gate.foreign_entries == 0
        assert not run.core.gate.open
        assert run.core.pager.pins == 0
    assert_same(plain, offloaded)


def penalty(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Linear: its backward reads no host parameter (poisoned then); a sum of two is the same in either order."""
    return sum((parameter.mul(0.3).sum() for parameter in parameters), torch.zeros(()))


# ---- losses on host parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_on_host_parameters_is_added_whenever_its_backward_runs(first: bool) -> None:
    def work(model: nn.Module) -> Outcome:
        parameters = list(model.parameters())
        before = penalty(parameters) if first else None  # made first, its backward runs last
        loss = model(BATCH).sum()
        (loss + (before if before is not None else penalty(parameters))).backward()
        return gradients(model)

    assert_equal(work)


def test_gradients_asked_for_by_parameter_hold_the_penalty_too() -> None:
    def work(model: nn.Module) -> Outcome:
        parameters = list(model.parameters())
        return list(torch.autograd.grad(model(BATCH).sum() + penalty(parameters), parameters))

    assert_equal(work)


def test_a_backward_into_some_parameters_holds_the_penalty_too() -> None:
    def work(model: nn.Module) -> Outcome:
        some = list(model.parameters())[:3]
        (model(BATCH).sum() + penalty(some)).backward(inputs=some)
        return gradients(model)

    assert_equal(work)


def test_a_parameter_that_only_the_penalty_uses_gets_its_gradient() -> None:
    def work(model: nn.Module) -> Outcome:
        wanted = [model[3].weight, model[0].weight]  # type: ignore[index]
        loss = model[0](BATCH).sum() + penalty(wanted[:1])  # type: ignore[index, operator]
        return list(torch.autograd.grad(loss, wanted))

    assert_equal(work)


def test_a_parameter_that_the_loss_does_not_use_is_an_error_as_ever() -> None:
    def work(model: nn.Module) -> Outcome:
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(model[0](BATCH).sum(), [model[3].weight])  # type: ignore[index, operator]
        return []

    assert_equal(work)


# ---- hooks that step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalised", [False, True])
def test_an_optimizer_that_steps_in_a_hook_steps_once_with_the_whole_gradient(penalised: bool) -> None:
    def work(model: nn.Module) -> Outcome:
        steppers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        calls: list[torch.Size] = []

        def step(parameter: torch.Tensor) -> None:
            calls.append(parameter.shape)
            steppers[parameter].step()  # type: ignore[index]
            steppers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss = model(BATCH).sum()
            (loss + penalty(list(model.parameters())) if penalised else loss).backward()
        assert len(calls) == 3 * len(steppers)
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_equal(work)


def test_hooks_of_a_backward_that_failed_do_not_run_after_the_next() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def work(model: nn.Module) -> Outcome:
        ran: list[Any] = []
        last, first = model[3].weight, model[0].weight  # type: ignore[index]
        last.register_post_accumulate_grad_hook(lambda _: ran.append("last"))
        first.register_post_accumulate_grad_hook(lambda _: ran.append("first"))
        hidden = Fails.apply(model[:2](BATCH))  # type: ignore[index, no-untyped-call]
        with pytest.raises(ZeroDivisionError):
            model[2:](hidden).sum().backward()  # type: ignore[index]
        ran.clear()
        model[:2](BATCH).sum().backward()  # type: ignore[index]
        return ran

    assert_equal(work)


def test_a_write_to_a_host_parameter_whose_bytes_are_aside_is_an_error() -> None:
    model = stack()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED), torch.no_grad():
        model[1].register_forward_hook(lambda *_: weight.mul_(2))  # type: ignore[index]
        weight = next(model.parameters())
        with pytest.raises(ModelChanged, match=r"wrote to '0.weight' while Checks"):
            model(BATCH)


# ---- other beginnings and ends of a backward ------------------------------------------------------------------------


def test_a_backward_from_a_gradient_edge_brings_all_gradients_home() -> None:
    def work(model: nn.Module) -> Outcome:
        edge = torch.autograd.graph.get_gradient_edge(model(BATCH).sum())
        torch.autograd.backward(edge, torch.ones(()))
        return gradients(model)

    assert_equal(work)


def test_gradients_from_an_edge_hold_the_penalty_too() -> None:
    def work(model: nn.Module) -> Outcome:
        parameters = list(model.parameters())
        edge = torch.autograd.graph.get_gradient_edge(model(BATCH).sum() + penalty(parameters[:2]))
        return list(torch.autograd.grad(edge, parameters, torch.ones(())))

    assert_equal(work)


def test_gradients_are_home_when_backward_returns_while_another_thread_is_in_forward() -> None:
    def work(model: nn.Module) -> Outcome:
        inside, done = threading.Event(), threading.Event()

        def wait(_module: nn.Module, _args: object) -> None:
            inside.set()
            done.wait()

        parameters = list(model.parameters())
        loss = model(BATCH).sum()
        handle = model[1].register_forward_pre_hook(wait)  # type: ignore[index]
        with beside(lambda: model(BATCH), until=done):
            inside.wait()
            handle.remove()
            loss.backward()
            outcome: Outcome = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        return outcome

    assert_equal(work)


# ---- what a forward does to parameters and arguments ----------------------------------------------------------------


class Momentum(nn.Module):
    """Replaces the data of one half by an average with the other, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                key.data = key.data * 0.75 + query.data * 0.25
            target = self.key(x)
        return (self.query(x) * target).mean()


class Freezing(nn.Module):
    """Freezes a part of itself in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.second.weight.requires_grad_(False)
        return self.second(self.first(x)).sum()


class Appending(nn.Module):
    """Adds to a list that its caller reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        losses.append(self.layer(x).square().mean())
        return self.layer(x)


def seeded(cls: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return cls()

    return build


def test_data_that_a_forward_replaces_is_kept() -> None:
    def work(model: nn.Module) -> Outcome:
        optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)  # type: ignore[union-attr]
        for _ in range(3):
            optimizer.zero_grad()
            model(BATCH).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_equal(work, seeded(Momentum))


def test_parameters_that_a_forward_freezes_stay_frozen() -> None:
    def work(model: nn.Module) -> Outcome:
        outcome: Outcome = []
        for _ in range(3):
            model.zero_grad()
            model(BATCH).backward()
            outcome += gradients(model)
        return [*outcome, str([parameter.requires_grad for parameter in model.parameters()])]

    assert_equal(work, seeded(Freezing))


def test_a_list_that_a_forward_appends_to_is_the_callers() -> None:
    def work(model: nn.Module) -> Outcome:
        losses: list[torch.Tensor] = []
        output = model(BATCH, losses)
        (output.sum() + sum(losses)).backward()
        return [*losses, *gradients(model)]

    assert_equal(work, seeded(Appending))


def test_a_slice_of_an_offloaded_sequence_runs() -> None:
    def work(model: nn.Module) -> Outcome:
        part = model[:2]  # type: ignore[index]
        part(BATCH).sum().backward()
        return gradients(model)

    assert_equal(work)


# ---- low-precision copies -------------------------------------------------------------------------------------------


def autocast_loss(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(BATCH).float().square().mean()  # type: ignore[no-any-return]


def test_a_backward_after_a_silent_write_does_not_take_the_new_weights_for_the_old_copies() -> None:
    model = stack()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        loss = autocast_loss(model)
        for parameter in model.parameters():
            parameter.data.mul_(2)
        with pytest.raises(RuntimeError, match="before the parameter was changed"):
            loss.backward()
        assert run.core.arrivals.dropped_copies > 0


@pytest.mark.parametrize("transfer", [1, 2])
def test_a_backward_that_lost_a_transfer_can_be_run_again_under_autocast(transfer: int) -> None:
    plain = stack(3)
    autocast_loss(plain).backward()
    model = stack(3)
    faults, to_device = _C.testing.FaultScript(), _C.testing.Operation.TO_DEVICE
    block = WIDTH * (WIDTH + 8) * 4
    device = SimulatedDevice(faults=faults)
    with hydra_ext.offload(model, budget=block + 48 * 2**10, device=device, checks=POISONED):
        loss = autocast_loss(model)
        faults.fail(to_device, transfer)
        with pytest.raises(hydra_ext.errors.TransferError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        offloaded = gradients(model)
    assert_same(gradients(plain), offloaded)
