"""``run.on_step``: figures of single steps, and what callbacks may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice, StepFigures, optim
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.runtime.placement.devices import CudaPlace
from hydra_ext.runtime.reporting.figures import StepMeter
from support.benches import assert_same
from support.runtime.native import LAYERS, WIDTH, stack, state
from support.training import parameter_bytes

BATCHES = torch.randn(6, 8, WIDTH, generator=torch.Generator().manual_seed(1))
WEIGHTS = parameter_bytes(stack())
BLOCK = WEIGHTS // LAYERS


@contextmanager
def offloaded(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, device: SimulatedDevice | None = None
) -> Iterator[Run]:
    budget = 3 * BLOCK + 2**15
    with hydra_ext.offload(model, optimizer, budget=budget, device=device, checks=Checks(poison_hosts=True)) as run:
        yield run
        report = run.report()
        assert report.windows > 0
        assert (report.refusals, report.fallbacks, report.faults) == (0, 0, 0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def step_in_a_loop(run: Run, batch: Tensor) -> None:
    run.model(batch).pow(2).mean().backward()
    assert run.optimizer is not None
    run.optimizer.step()
    run.optimizer.zero_grad()


def whole_step(run: Run, batches: Tensor = BATCHES[:2]) -> hydra_ext.StepOutput:
    return run.step(list(batches), lambda batch: run.model(batch).pow(2).mean())


# ---- what they say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_figures_agree_with_each_other_and_with_the_report(whole: bool, native: bool) -> None:
    model = stack()
    optimizer = optim.AdamW(model.parameters()) if native else sgd(model)
    seen: list[StepFigures] = []
    with offloaded(model, optimizer) as run:
        whole_step(run)
        run.sync()
        before, lanes_before = run.report(), run.core.memory.backend.to_host_statistics.busy_seconds
        run.on_step(seen.append)
        for batch in BATCHES[:4]:
            if whole:
                whole_step(run)
            else:
                step_in_a_loop(run, batch)
        after, lanes_after = run.report(), run.core.memory.backend.to_host_statistics.busy_seconds
    assert [figures.step for figures in seen] == [2, 3, 4, 5]
    for figures in seen:
        assert figures.budget_bytes == run.budget
        assert 0 < figures.peak_bytes <= run.budget
        at_once = 0.0 if native else figures.update_seconds
        assert figures.compute_seconds is not None
        assert figures.compute_seconds > 0
        parts = figures.compute_seconds + figures.waited_seconds + at_once
        assert parts == pytest.approx(figures.seconds)
        assert (figures.tokens, figures.tokens_per_second) == (None, None)
    assert sum(figures.to_host_seconds for figures in seen) == pytest.approx(lanes_after - lanes_before)
    assert max(figures.peak_bytes for figures in seen) <= after.peak_bytes
    if not native:
        assert all(figures.update_seconds > 0 for figures in seen)
    elif not whole:
        # From one step() to the next all of an update is inside; the last one is under way yet.
        updated = sum(figures.update_seconds for figures in seen)
        assert 0 < updated <= run.core.update.seconds - before.update_seconds


def test_the_peak_is_that_of_the_step() -> None:
    model = stack()
    seen: list[StepFigures] = []
    with hydra_ext.offload(model, sgd(model), budget="16MiB", checks=Checks(poison_hosts=True)) as run:
        step_in_a_loop(run, torch.ones(2000, WIDTH))  # before it is asked for
        run.on_step(seen.append)
        for rows in (8, 2000, 8):
            step_in_a_loop(run, torch.ones(rows, WIDTH))
        assert run.report().windows == 8
        report = run.report()
    activation = 4 * WIDTH * 2000
    small, large, again = (figures.peak_bytes for figures in seen)
    assert report.peak_bytes == large > WEIGHTS + activation
    assert WEIGHTS <= again < WEIGHTS + activation
    assert WEIGHTS <= small < WEIGHTS + activation


def slow_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                pass
            return super().step(closure)

    return Slow(model.parameters(), lr=1e-3)


# The weights cross a slow link in half a second or more; once warm, a step computes some milliseconds.
SLOW = 2.0 * WEIGHTS
BOUND = {
    "compute": (None, sgd),
    "host to device": (SimulatedDevice(to_device_bytes_per_second=SLOW), sgd),
    "device to host": (SimulatedDevice(to_host_bytes_per_second=SLOW), sgd),
    "optimizer": (None, slow_optimizer),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("resource", BOUND)
def test_the_binding_resource_is_the_one_that_works_longest(resource: str, whole: bool) -> None:
    device, make_optimizer = BOUND[resource]
    model = stack()
    seen: list[StepFigures] = []
    with offloaded(model, make_optimizer(model), device=device) as run:
        for _ in range(2):
            if whole:
                whole_step(run)
            else:
                step_in_a_loop(run, BATCHES[0])
            if not seen:
                run.on_step(seen.append)
    (figures,) = seen
    assert figures.binding == resource
    busy = {
        "compute": figures.compute_seconds,
        "host to device": figures.to_device_seconds,
        "device to host": figures.to_host_seconds,
        "optimizer": figures.update_seconds,
    }
    assert max(busy, key=busy.__getitem__) == resource
    if device is not None:
        assert busy[resource] > 0.4
        assert figures.waited_seconds > 0.2


def test_on_a_gpu_nothing_is_said_about_compute_that_the_host_cannot_see() -> None:
    model = stack()
    seen: list[StepFigures] = []
    with offloaded(model, sgd(model)) as run:
        run.meter = StepMeter(run.core, CudaPlace(0), budget=run.budget)
        run.on_step(seen.append)
        whole_step(run)
    (figures,) = seen
    assert (figures.compute_seconds, figures.binding) == (None, None)
    assert figures.to_device_seconds > 0
    assert "bound by" not in str(figures)


def test_tokens_are_counted_by_whoever_asks() -> None:
    model = stack()
    seen: list[StepFigures] = []
    without: list[StepFigures] = []
    with offloaded(model, sgd(model)) as run:
        run.on_step(seen.append, tokens=lambda batch: batch.shape[0])
        run.on_step(without.append)
        whole_step(run, BATCHES[:3])
        step_in_a_loop(run, BATCHES[0])
    assert [figures.tokens for figures in seen] == [3 * 8, None]
    assert seen[0].tokens_per_second == pytest.approx(24 / seen[0].seconds)
    assert f"  {24 / seen[0].seconds:,.0f} tokens/s  " in str(seen[0])
    assert seen[1].tokens_per_second is None
    assert [figures.tokens for figures in without] == [None, None]
    assert without[0].seconds == seen[0].seconds


def test_figures_are_frozen_and_become_a_dict_and_a_line() -> None:
    figures = StepFigures(
        step=3,
        seconds=0.5,
        tokens=1000,
        tokens_per_second=2000.0,
        peak_bytes=3 * 2**19,
        budget_bytes=2**21,
        compute_seconds=0.2,
        to_device_seconds=0.4,
        to_host_seconds=0.1,
        update_seconds=0.0,
        waited_seconds=0.3,
        binding="host to device",
    )
    assert str(figures) == "step 3  0.500 s  2,000 tokens/s  device 1.5 of 2.0 MiB  bound by host to device"
    assert figures.as_dict()["to_device_seconds"] == 0.4
    with pytest.raises(FrozenInstanceError):
        figures.step = 4  # type: ignore[misc]


@pytest.mark.parametrize("native", [True, False])
def test_an_optimizer_that_calls_its_base_class_makes_one_step(native: bool) -> None:
    base: Any = optim.SGD if native else torch.optim.SGD

    class Derived(base):  # type: ignore[misc]
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    base(stack().parameters(), lr=1e-3)  # torch wraps a class's step() when the first of them is made
    model = stack()
    optimizer = Derived(model.parameters(), lr=1e-3)
    seen: list[StepFigures] = []
    with offloaded(model, optimizer) as run:
        run.on_step(seen.append)
        step_in_a_loop(run, BATCHES[0])
        whole_step(run)
        optimizer.fails = True
        with pytest.raises(ZeroDivisionError):
            step_in_a_loop(run, BATCHES[0])
        optimizer.fails = False
        step_in_a_loop(run, BATCHES[0])
        step_in_a_loop(run, BATCHES[0])
    assert [figures.step for figures in seen] == [1, 2, 3, 4]


# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_a_callback_runs_once_a_step_on_the_callers_thread_until_it_is_removed() -> None:
    model = stack()
    threads: list[int] = []
    with offloaded(model, sgd(model)) as run:
        handle = run.on_step(lambda _figures: threads.append(threading.get_ident()))
        whole_step(run)
        step_in_a_loop(run, BATCHES[0])
        handle.remove()
        whole_step(run)
        with run.on_step(lambda _figures: threads.append(threading.get_ident())):
            step_in_a_loop(run, BATCHES[0])
        step_in_a_loop(run, BATCHES[0])
    assert threads == [threading.get_ident()] * 3


def test_nothing_is_measured_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_meter: StepMeter) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(StepMeter, "_now", explode)
    model = stack()
    with offloaded(model, sgd(model)) as run:
        whole_step(run)
        step_in_a_loop(run, BATCHES[0])
        assert run.meter.steps == 2
        with pytest.raises(AssertionError, match="measured"):
            run.on_step(lambda figures: None)


@pytest.mark.cases(1)
@pytest.mark.parametrize("native", [True, False])
def test_figures_and_callbacks_that_raise_change_no_bit(native: bool) -> None:
    class Unwilling(Exception):
        pass

    def refuse(_figures: StepFigures) -> None:
        raise Unwilling

    outcomes = []
    for asked in (False, True):
        model = stack()
        optimizer = (
            optim.AdamW(model.parameters(), lr=1e-2) if native else torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        with offloaded(model, optimizer) as run:
            if asked:
                run.on_step(refuse)
            for index, batch in enumerate(BATCHES):
                try:
                    if index % 2:
                        whole_step(run, BATCHES[index - 1 : index + 1])
                    else:
                        run.model(batch).pow(2).mean().backward()
                        optimizer.step()
                except Unwilling:
                    assert asked
                else:
                    assert not asked
                optimizer.zero_grad()
            run.sync()
            assert run.meter.steps == len(BATCHES)
        outcomes.append(state(model, optimizer))
    assert_same(*outcomes)


def test_a_step_that_fails_is_none_and_one_that_is_skipped_is() -> None:
    model = stack()
    seen: list[StepFigures] = []

    def fail(_batch: Tensor) -> Tensor:
        raise ZeroDivisionError

    with offloaded(model, optim.AdamW(model.parameters())) as run:
        run.on_step(seen.append)
        with pytest.raises(ZeroDivisionError):
            run.step([BATCHES[0]], fail)
        assert seen == []
        out = run.step([BATCHES[0]], lambda batch: (run.model(batch) * float("inf")).sum(), max_norm=1.0)
        assert out.skipped
        whole_step(run)
    assert [figures.step for figures in seen] == [1, 2]


def test_what_cannot_be_asked_for_is_refused() -> None:
    model = stack()
    with hydra_ext.offload(model, budget="1MiB") as run, pytest.raises(StateError, match="needs the optimizer"):
        run.on_step(print)
    with hydra_ext.offload(model, sgd(model), budget="1MiB") as run:
        with pytest.raises(InvalidArgument, match="callback="):
            run.on_step("print")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="tokens="):
            run.on_step(print, tokens=7)  # type: ignore[arg-type]
