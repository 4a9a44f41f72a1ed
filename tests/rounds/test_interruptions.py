"""Errors and interrupts anywhere in a step: everything unwinds, nothing is left, and training goes on as if not."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks
from hydra_ext.runtime import rounds
from hydra_ext.runtime.rounds.fibers import Fiber
from support.models.zoo_more import MORE_FAMILIES
from support.rounds.rounds import (
    Plan,
    Seen,
    assert_nothing_left,
    build_optimizer,
    differences,
    train_loop,
    train_rounds,
)

FAMILY = MORE_FAMILIES["residual"]
PLAN = Plan(m=3)
STEPS = 2
BATCHES = FAMILY.batches(1, STEPS * PLAN.m)
LAYERS = 4
ROOMY = 2**22
PATIENCE = 20.0  # seconds


class Stop(Exception):
    """Raised by the user's code."""


def loss(model: nn.Module, batch: Any) -> Tensor:
    return FAMILY.loss(model, batch)


def reference() -> Seen:
    return train_loop(FAMILY.make(0), loss, BATCHES, PLAN, steps=STEPS)


@contextmanager
def an_offloaded_model() -> Iterator[tuple[hydra_ext.Run, nn.Module]]:
    model = FAMILY.make(0)
    optimizer = build_optimizer(model, PLAN)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run:
        yield run, model


def assert_trains_on(run: hydra_ext.Run, model: nn.Module, **choices: Any) -> None:
    """As if the step that failed had not been."""
    assert_nothing_left(run)
    threads = threading.active_count()
    model.zero_grad()
    seen = train_rounds(run, model, loss, BATCHES, PLAN, steps=STEPS, **choices)
    assert differences(seen, reference()) == []
    report = run.report()
    assert report.windows > 0
    assert (report.refusals, report.fallbacks) == (0, 0)
    assert threading.active_count() == threads


def at_call(number: int, act: Callable[[], object]) -> Callable[..., None]:
    """A hook that acts when it is called for the n-th time, and never again."""
    left = [number]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            act()

    return hook


def stop() -> None:
    raise Stop("by the user's code")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("microbatch", range(PLAN.m))
def test_an_error_at_any_microbatch_and_block_is_raised_as_it_was(microbatch: int, layer: int, recompute: bool) -> None:
    unwound: list[int] = []

    def fn(batch: Any) -> Tensor:
        try:
            return loss(model, batch)
        finally:
            unwound.append(1)

    with an_offloaded_model() as (run, model):
        handle = model.layers[layer].register_forward_pre_hook(at_call(microbatch, stop))
        with pytest.raises(Stop) as caught:
            run.step(BATCHES[: PLAN.m], fn, round_size=PLAN.m, recompute=recompute)
        handle.remove()
        frames = "".join(traceback.format_tb(caught.value.__traceback__))
        assert "in fn" in frames
        assert "in stop" in frames
        assert len(unwound) == PLAN.m
        assert_trains_on(run, model, round_size=PLAN.m, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("microbatch", range(PLAN.m))
def test_an_error_in_the_backward_of_any_microbatch_and_block(microbatch: int, layer: int, recompute: bool) -> None:
    def spoil(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    hook = at_call(microbatch, stop)
    with an_offloaded_model() as (run, model):
        handle = model.layers[layer].norm.register_forward_hook(spoil)
        with pytest.raises(Stop):
            run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=recompute)
        handle.remove()
        assert_trains_on(run, model, round_size=PLAN.m, recompute=recompute)


def test_an_error_before_the_first_and_after_the_last_block() -> None:
    for before in (True, False):
        with an_offloaded_model() as (run, model):
            count = iter(range(PLAN.m))

            def fn(batch: Any, before: bool = before, count: Iterator[int] = count, model: nn.Module = model) -> Tensor:
                number = next(count)
                value = loss(model, batch) if not before else None
                if number == 1:
                    stop()
                return loss(model, batch) if value is None else value

            with pytest.raises(Stop):
                run.step(BATCHES[: PLAN.m], fn, round_size=PLAN.m, recompute=False)
            assert_trains_on(run, model, round_size=PLAN.m, recompute=False)


def test_a_function_that_catches_everything_is_unwound_all_the_same() -> None:
    caught: list[str] = []

    def stubborn(batch: Any) -> Tensor:
        for _ in range(2):
            try:
                return loss(model, batch)
            except BaseException as error:  # noqa: BLE001 - that is the test
                caught.append(type(error).__name__)
        return loss(model, batch)

    def fn(batch: Any) -> Tensor:
        return loss(model, batch) if batch is BATCHES[0] else stubborn(batch)

    with an_offloaded_model() as (run, model):
        handle = model.layers[1].register_forward_pre_hook(at_call(0, stop))
        with pytest.raises(Stop):
            run.step(BATCHES[: PLAN.m], fn, round_size=PLAN.m, recompute=False)
        handle.remove()
        assert set(caught) == {"Cancelled"}
        assert_trains_on(run, model, round_size=PLAN.m, recompute=False)


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def ctrl_c() -> None:
    """As the kernel does it: the main thread gets the signal."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize("call", range(0, 2 * LAYERS * PLAN.m, 2))
def test_ctrl_c_while_a_microbatch_runs(call: int) -> None:
    """Forward calls of layers, then backward calls: one after another over the whole step."""
    interrupt = at_call(call, ctrl_c)

    def spoil(_module: nn.Module, _args: Any, output: Tensor) -> None:
        interrupt()
        output.register_hook(interrupt)

    with an_offloaded_model() as (run, model):
        handles = [layer.norm.register_forward_hook(spoil) for layer in model.layers]
        with pytest.raises(KeyboardInterrupt):
            run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=False)
        for handle in handles:
            handle.remove()
        assert_trains_on(run, model, round_size=PLAN.m, recompute=False)


def test_ctrl_c_reaches_a_microbatch_that_computes_in_python() -> None:
    reached: list[str] = []

    def spin(*_: Any) -> None:
        ctrl_c()
        try:
            while True:
                pass
        except KeyboardInterrupt:
            reached.append(threading.current_thread().name)
            raise

    with an_offloaded_model() as (run, model):
        handle = model.layers[2].register_forward_pre_hook(at_call(1, spin))
        with pytest.raises(KeyboardInterrupt):
            run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=False)
        handle.remove()
        assert reached == ["microbatch-1"]
        assert_trains_on(run, model, round_size=PLAN.m, recompute=False)


def test_an_interrupt_just_outside_the_wait_reaches_the_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between waking it and waiting for it."""
    spinning = threading.Event()
    told: list[int] = []
    wait = Fiber._wait

    def late(fiber: Fiber[Any]) -> None:
        while not told and (fiber._permitted or fiber._running):
            if spinning.is_set():
                told.append(fiber.index)
                raise KeyboardInterrupt
        wait(fiber)

    def spin(*_: Any) -> None:
        spinning.set()
        while True:
            pass

    with an_offloaded_model() as (run, model):
        handle = model.layers[2].register_forward_pre_hook(at_call(1, spin))
        monkeypatch.setattr(Fiber, "_wait", late)
        with pytest.raises(KeyboardInterrupt):
            run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=False)
        monkeypatch.undo()
        handle.remove()
        assert told == [1]
        assert_trains_on(run, model, round_size=PLAN.m, recompute=False)


class AtLine:
    """Raises KeyboardInterrupt at the n-th line that the main thread runs in the folder of rounds."""

    def __init__(self, line: int) -> None:
        self.left = line
        self._folder = str(Path(rounds.__file__).parent.name)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if Path(frame.f_code.co_filename).parent.name != self._folder:
            return None
        if event == "line" and threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def lines_of_a_step() -> int:
    with an_offloaded_model() as (run, model):
        counter = AtLine(10**9)
        with counter.tracing():
            run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=False)
    return 10**9 - counter.left


@pytest.mark.parametrize("share", sorted(random.Random(0).random() for _ in range(50)), ids=lambda s: f"{s:.3f}")
def test_ctrl_c_at_fifty_random_lines_of_a_step(share: float) -> None:
    trace = AtLine(int(share * lines_of_a_step()))
    with an_offloaded_model() as (run, model):
        with pytest.raises(KeyboardInterrupt), trace.tracing():
            run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=False)
        if differences_of_weights(model):
            return  # the update had begun, which is the optimizer's own
        assert_trains_on(run, model, round_size=PLAN.m, recompute=False)


def differences_of_weights(model: nn.Module) -> bool:
    fresh = FAMILY.make(0)
    return any(not torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def activation_bytes(run: hydra_ext.Run) -> int:
    """Once copies under way and threads that end have let go of theirs. What refers to itself never would."""
    until = time.monotonic() + PATIENCE
    while (held := run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS)) and time.monotonic() < until:
        time.sleep(0)
    return held


def assert_a_failed_step_keeps_no_activations(run: hydra_ext.Run, model: nn.Module, *, recompute: bool) -> None:
    """Once its error is forgotten, which what pytest raises with would keep."""
    failed = False
    try:
        run.step(BATCHES[: PLAN.m], lambda b: loss(model, b), round_size=PLAN.m, recompute=recompute)
    except Stop:
        failed = True
    assert failed
    assert activation_bytes(run) == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_an_error_keeps_no_activations_once_it_is_forgotten(recompute: bool) -> None:
    with an_offloaded_model() as (run, model), collector_off():
        for call in (1, PLAN.m if recompute else PLAN.m - 1):  # in forward, and in what backward runs again
            handle = model.layers[3].norm.register_forward_hook(at_call(call, stop))
            assert_a_failed_step_keeps_no_activations(run, model, recompute=recompute)
            handle.remove()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_error_of_a_parameters_hook_keeps_no_activations(layer: int, recompute: bool) -> None:
    """torch keeps what was ready to run beside it until its thread runs another backward."""
    with an_offloaded_model() as (run, model):
        with collector_off():
            for parameter in model.layers[layer].parameters():
                handle = parameter.register_hook(lambda _: stop())
                assert_a_failed_step_keeps_no_activations(run, model, recompute=recompute)
                handle.remove()
        assert_trains_on(run, model, round_size=PLAN.m, recompute=recompute)
