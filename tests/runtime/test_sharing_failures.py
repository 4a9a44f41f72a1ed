"""What goes wrong on a shared device: it is told, the other runs keep their bits, and the device can be used again."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hydra_ext
from hydra_ext import SharedDevice
from hydra_ext.errors import InvalidArgument, InvalidBudget, StateError, TenantsFailed
from support.benches import Outcome, assert_same
from support.runtime.tenants import (
    Context,
    Offloaded,
    Work,
    alone,
    assert_as_alone,
    loop,
    seed_process,
    slow_device,
    stack,
)

WIDTH = 64


class Stop(Exception):
    pass


def device_of(budget: int | str = "1MiB") -> SharedDevice:
    return SharedDevice(slow_device(), budget=budget)


def assert_usable(device: SharedDevice) -> None:
    """A failure left nothing behind: runs on the device have their bits."""
    assert all(not thread.name.startswith("tenant-") for thread in threading.enumerate())
    assert_as_alone([loop, partial(loop, layers=4, optimizer="native")], device)


def stops_after(steps: int, error: BaseException, context: Context) -> Outcome:
    model = stack(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with context(model, optimizer):
        for step in range(steps + 1):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            if step == steps:
                raise error
            optimizer.step()
            optimizer.zero_grad()
    return []


# ---- calls that are refused -----------------------------------------------------------------------------------------


def test_there_has_to_be_something_to_run() -> None:
    device = device_of()
    with pytest.raises(InvalidArgument, match="at least one function"):
        device.run()
    with pytest.raises(InvalidArgument, match="functions only"):
        device.run(lambda: None, 3)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="nothing has run"):
        device.report()
    assert device.run(lambda: 1, lambda: "two") == [1, "two"]


def test_a_budget_has_to_be_a_size() -> None:
    with pytest.raises(InvalidBudget):
        SharedDevice(slow_device(), budget="much")
    with pytest.raises(InvalidBudget):
        SharedDevice(slow_device(), budget="auto")  # it has no memory of its own
    assert device_of(123456).budget == 123456


def test_a_run_inside_a_run_is_refused() -> None:
    device = device_of()

    def again() -> None:
        device.run(lambda: None)

    with pytest.raises(StateError, match="runs functions already"):
        device.run(again)
    assert_usable(device)


def test_a_shared_device_inside_a_run_of_another_is_refused() -> None:
    device, other = device_of(), device_of()

    def enter() -> None:
        Offloaded(other)(stack(2), None).__enter__()

    with pytest.raises(StateError, match=r"given to SharedDevice\.run"):
        device.run(enter)
    assert_usable(device)


def test_its_contexts_are_entered_inside_its_functions() -> None:
    device = device_of()
    model = stack(2)
    for _ in range(2):
        with pytest.raises(StateError, match=r"given to SharedDevice\.run"):
            hydra_ext.offload(model, budget=100_000, device=device)
        device.run(lambda: None)  # neither before nor after a run


def test_budgets_that_together_exceed_the_devices_are_refused() -> None:
    device = device_of(300_000)
    tried = threading.Event()

    def first(context: Context) -> Outcome:
        model = stack(6)
        with context(model, None), torch.no_grad():
            for _ in range(10_000):
                model(torch.randn(8, WIDTH))
                if tried.is_set():
                    return []
        raise AssertionError

    def second() -> str:
        model = stack(6)
        while device.report().tenants[0].to_device_seconds == 0:
            with hydra_ext.offload(stack(6), budget=90_000, device=device) as run, torch.no_grad():
                run.model(torch.randn(8, WIDTH))
        try:
            with pytest.raises(InvalidBudget, match="give at most 100000 bytes") as caught:
                hydra_ext.offload(model, budget=100_001, device=device).__enter__()
        finally:
            tried.set()
        return str(caught.value)

    told = device.run(partial(first, Offloaded(device, budget=200_000)), second)[1]
    assert "200000 are given to others" in told
    assert_usable(device)


def test_ranks_of_a_process_group_cannot_share() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        device = device_of()
        with pytest.raises(InvalidArgument, match="ranks of a process group cannot share"):
            device.run(partial(loop, Offloaded(device)))
        options = {"activations": None, "process_group": False}
        assert_as_alone([loop, loop], device, options=options)
    finally:
        dist.destroy_process_group()


# ---- functions that raise -------------------------------------------------------------------------------------------


def test_a_function_that_raises_leaves_the_others_their_bits() -> None:
    device = device_of()
    works: list[Work] = [loop, partial(loop, layers=8)]
    expected = alone(works)
    seen: dict[int, Outcome] = {}

    def noted(number: int) -> None:
        seen[number] = works[number](Offloaded(device))

    error = Stop("on purpose")
    seed_process()
    with pytest.raises(Stop) as caught:
        device.run(partial(noted, 0), partial(stops_after, 1, error, Offloaded(device)), partial(noted, 1))
    assert caught.value is error
    for number in (0, 1):
        assert_same(expected[number], seen[number])
    assert_usable(device)


def test_all_errors_are_told_if_several_functions_raise() -> None:
    device = device_of()
    first, second = Stop("one"), ValueError("other")
    with pytest.raises(TenantsFailed, match=r"2 of the functions .* 0: Stop: one; 2: ValueError: other") as caught:
        device.run(
            partial(stops_after, 0, first, Offloaded(device)),
            partial(loop, Offloaded(device)),
            partial(stops_after, 2, second, Offloaded(device)),
        )
    assert caught.value.errors == {0: first, 2: second}
    assert caught.value.__cause__ is first
    assert_usable(device)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_in_a_pass_the_step_can_be_repeated(where: str) -> None:
    def repeated(context: Context, *, fails: bool) -> Outcome:
        model = stack(6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        failures = [Stop(), Stop()] if fails else []

        def fail(value: Any) -> Any:
            if failures:
                raise failures.pop()
            return value

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            if where == "forward":
                fail(None)
            elif output.requires_grad:
                output.register_hook(fail)

        model[6].register_forward_hook(hook)
        seen: Outcome = []
        with context(model, optimizer):
            for step in range(4):
                batch = torch.full((8, WIDTH), 0.1 * step)
                while True:
                    torch.manual_seed(step)
                    try:
                        loss = model(batch).square().mean()
                        loss.backward()
                        break
                    except Stop:
                        optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach().clone())
        return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]

    works: list[Work] = [partial(repeated, fails=True), loop, partial(repeated, fails=True)]
    reference = alone([partial(repeated, fails=False), loop, partial(repeated, fails=False)])
    assert_as_alone(works, reference=reference)


# ---- interrupts -----------------------------------------------------------------------------------------------------


def endless(context: Context, ends: list[int], *, after: int | None = None) -> Outcome:
    """Trains until it is interrupted. ``after`` so many steps it interrupts the process, as a user does."""
    model = stack(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with context(model, optimizer):
        for step in range(2_000):
            if step == after:
                os.kill(os.getpid(), signal.SIGINT)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ends.append(len(ends))  # an interrupt that came at last
    return []


@pytest.mark.parametrize("after", [0, 1, *(pytest.param(after, marks=pytest.mark.full) for after in range(2, 10))])
def test_an_interrupt_ends_all_runs(after: int) -> None:
    device = device_of()
    ends: list[int] = []
    works = [partial(endless, Offloaded(device), ends, after=when) for when in (None, after, None)]
    seed_process()
    with pytest.raises(KeyboardInterrupt):
        device.run(*works)
    assert not ends
    assert_usable(device)


def test_a_thread_whose_start_was_interrupted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when the thread was asked for, and it begins behind that."""
    device, start = device_of(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "tenant-1":
            start(thread)
            return
        start(threading.Timer(0.2, start, (thread,)))
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.run(lambda: None, lambda: None)
    assert device._sharing is not None
    assert all(tenant.ended for tenant in device._sharing.tenants)


def test_an_interrupt_behind_all_functions_but_one_reaches_that_one() -> None:
    device = device_of()
    ends: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        device.run(lambda: None, partial(endless, Offloaded(device), ends, after=2), lambda: None)
    assert not ends
    assert_usable(device)
