"""Plans that forecasts cannot tell apart are timed: which one stays, after how many steps. Forecasts are corrected."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hydra_ext
from hydra_ext import SimulatedDevice
from hydra_ext.runtime import fit
from hydra_ext.runtime.rounds.fibers import compute_seconds
from hydra_ext.runtime.step_planner import PlanTrials, StepSeconds
from support.runtime.fitted import optimizer_of
from support.runtime.layered import WIDTH, Layered, data, loss_of

FAST, SLOW, OTHER = "fast", "slow", "other"  # in place of plans, of which only identity matters


def trials_of(*plans: str) -> PlanTrials:
    return PlanTrials(cast("list[Any]", [*plans]))


def run(trials: PlanTrials, seconds: dict[str, list[float]]) -> list[object]:
    """Makes steps until a plan's seconds are spent, which are in the order of its steps. Returns what they ran by."""
    ran: list[object] = []
    left = {plan: [*each] for plan, each in seconds.items()}
    while left[cast("str", trials.planned)]:
        ran.append(trials.planned)
        trials.note(StepSeconds(left[cast("str", trials.planned)].pop(0)))
    return ran


def taken(trials: PlanTrials) -> dict[object, float]:
    return {plan: took.seconds for plan, took in trials.seconds.items()}


@pytest.mark.parametrize("plans", [(FAST, SLOW), (SLOW, FAST)])
def test_a_step_that_something_else_made_longer_does_not_decide(plans: tuple[str, str]) -> None:
    trials = trials_of(*plans)
    ran = run(trials, {FAST: [9, 5, 5, 9, 5, 1, 5, 5, 5], SLOW: [9, 2, 2, 9, 2, 2]})
    assert ran[:12] == [plan for plan in plans * 2 for _ in range(3)]
    assert set(ran[12:]) == {FAST}
    assert taken(trials) == {FAST: 1, SLOW: 2}


@pytest.mark.parametrize("plans", [(FAST, SLOW), (SLOW, FAST)])
def test_a_machine_that_is_slow_for_a_while_does_not_decide(plans: tuple[str, str]) -> None:
    """Each plan has a turn at another time."""
    trials = trials_of(*plans)
    for step in range(12):
        factor = 3 if step < 3 else 1
        trials.note(StepSeconds(factor * (1.0 if trials.planned == FAST else 1.2)))
    assert trials.planned == FAST


def test_the_first_step_of_a_turn_does_not_count() -> None:
    trials = trials_of(FAST, SLOW)
    run(trials, {FAST: [0.1, 3, 3, 0.1, 3, 3, 0.5], SLOW: [0.2, 4, 4, 0.2, 4, 4]})
    assert taken(trials) == {FAST: 3, SLOW: 4}


def test_one_note_says_that_all_are_timed() -> None:
    trials = trials_of(FAST, SLOW)
    assert [trials.note(StepSeconds(1)) for _ in range(16)] == [False] * 11 + [True] + [False] * 4
    trials = trials_of(FAST)
    assert [trials.note(StepSeconds(1)) for _ in range(5)] == [False, False, True, False, False]


def test_others_that_are_found_later_are_timed_beside_the_fastest() -> None:
    trials = trials_of(SLOW)
    assert [trials.note(StepSeconds(2)) for _ in range(3)] == [False, False, True]
    trials.try_also(cast("list[Any]", [SLOW, OTHER, FAST]))
    ran = run(trials, {OTHER: [3] * 6, FAST: [1] * 9, SLOW: [2] * 6})
    assert ran == [plan for plan in (OTHER, FAST, SLOW) * 2 for _ in range(3)] + [FAST] * 3
    trials.try_also(cast("list[Any]", [SLOW, OTHER, FAST]))
    assert trials.planned is FAST


class Equal:
    """Plans that are equal, and not the same."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 0


def test_an_equal_plan_with_a_newer_forecast_takes_the_place_of_the_old_one() -> None:
    old, new = Equal(), Equal()
    trials = PlanTrials(cast("list[Any]", [old]))
    assert [trials.note(StepSeconds(2, 1)) for _ in range(3)] == [False, False, True]
    trials.try_also(cast("list[Any]", [new]))
    assert trials.planned is new
    assert len(trials.seconds) == 1
    assert next(iter(trials.seconds)) is new
    assert trials.seconds[trials.planned] == StepSeconds(2, 1)
    assert not trials.note(StepSeconds(3, 0.5))  # it is not timed again
    assert trials.seconds[trials.planned] == StepSeconds(2, 0.5)


# ---- forecasts ------------------------------------------------------------------------------------------------------
class Ticks(TorchDispatchMode):
    """A clock that goes on with each operator."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.now = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += self.rate
        return func(*args, **(kwargs or {}))


def test_a_forecast_is_corrected_where_the_first_microbatch_took_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Layered(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
    )
    microbatches = data(4)

    def fn(x: Tensor) -> Tensor:
        clock.rate = 1.0 if clock.now else 1.3
        return loss_of(model, x)

    with (
        Ticks(0.0) as clock,
        hydra_ext.offload(model, optimizer_of(model), budget=2**26, device=SimulatedDevice()) as run,
    ):
        monkeypatch.setattr(time, "thread_time", lambda: clock.now)
        monkeypatch.setattr(fit, "compute_seconds", lambda: clock.now)
        foreseen, took = [], []

        def step(batch: list[Tensor]) -> None:
            begin = clock.now
            run.step(batch, fn)
            took.append(clock.now - begin)
            foreseen.append(run.plan().lanes["compute"])

        for _ in range(16):  # some to time two plans
            step(microbatches)
        assert foreseen[0] > 1.2 * took[-1]
        assert foreseen[-1] == pytest.approx(took[-1], rel=0.15)
        # Other shapes are measured in a microbatch that is no longer the first one.
        step([torch.cat([x] * 2) for x in microbatches])
        assert foreseen[-1] == pytest.approx(took[-1], rel=0.15)


def test_a_forecast_that_is_far_off_is_corrected_before_all_plans_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layered(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    with (
        Ticks(0.0) as clock,
        hydra_ext.offload(model, optimizer_of(model), budget=2**26, device=SimulatedDevice()) as run,
    ):
        monkeypatch.setattr(time, "thread_time", lambda: clock.now)
        monkeypatch.setattr(fit, "compute_seconds", lambda: clock.now)

        def fn(x: Tensor) -> Tensor:
            clock.rate = 1.0 if clock.now else 5.0
            return loss_of(model, x)

        foreseen = []
        for _ in range(4):  # the first is measured, the second does not count, the third is far off
            run.step(data(4), fn)
            foreseen.append(run.plan().lanes["compute"])
        assert foreseen[0] == foreseen[1]
        assert foreseen[3] < 0.6 * foreseen[0]


def test_a_plan_is_judged_anew_with_what_was_learnt_since() -> None:
    model = Layered(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    with hydra_ext.offload(model, optimizer_of(model), budget=2**26, device=SimulatedDevice()) as run:
        run.step(data(1), lambda x: loss_of(model, x))
        run.step(data(1), lambda x: loss_of(model, x))
        before, planned = run.plan(), run.fit.applied
        assert planned is not None
        computed = 1.5 * before.lanes["compute"]
        assert run.fit.planner.learn(planned, StepSeconds(computed, computed))
        after = run.plan()
        assert after.lanes["compute"] == pytest.approx(computed)
        assert after.seconds >= computed
        assert after.peak_bytes == before.peak_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_threads_of_a_round_compute_counts(size: int) -> None:
    model = Layered(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    spent: list[float] = []  # by threads other than this one

    def fn(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        if threading.current_thread() is not threading.main_thread():
            spent.append(time.thread_time())
        return loss

    with hydra_ext.offload(model, optimizer_of(model), budget=2**26, device=SimulatedDevice()) as run:
        before = compute_seconds() - time.thread_time()
        run.step(data(4), fn, round_size=size)
        found = compute_seconds() - time.thread_time() - before
    assert len(spent) == 4
    assert found > sum(spent)


def test_a_plan_that_was_left_does_not_take_weights_from_the_next_one() -> None:
    """Its activations were larger. Weights have their room again once a step has run by the next plan."""
    model = Layered(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    microbatches = data(4)
    rows = [torch.cat([x] * 8) for x in microbatches]
    activations = 18 * rows[0].nbytes  # of one large microbatch
    with hydra_ext.offload(
        model,
        optimizer_of(model),
        budget=weights + activations,
        device=SimulatedDevice(),
        activations=hydra_ext.Keep(),
    ) as run:
        loads = []
        for batch in (microbatches, rows, microbatches, microbatches, microbatches):
            before = run.report().loads
            run.step(batch, lambda x: loss_of(model, x), round_size=1)
            loads.append(run.report().loads - before)
            run.core.pager.forget_activations()
    assert loads[1] > loads[0]
    assert loads[-1] <= loads[0]


# ---- a machine that changes -----------------------------------------------------------------------------------------
def test_steps_that_stay_slower_have_a_microbatch_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 20 of them, then after 40: lengths that differ are no change of the machine."""
    model = Layered(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    microbatches = data(1)
    now = 0.0
    with hydra_ext.offload(model, optimizer_of(model), budget=2**26, device=SimulatedDevice()) as run:
        monkeypatch.setattr(type(run.fit), "_clocks", lambda _: StepSeconds(now, now))
        measured: list[int] = []

        def steps(count: int, seconds: float) -> int:
            """Makes steps of so many seconds. Returns how many microbatches were measured."""
            nonlocal now
            before = len(measured)

            def fn(x: Tensor) -> Tensor:
                nonlocal now
                now += seconds
                return loss_of(model, x)

            for _ in range(count):
                run.step(microbatches, fn)
            return len(measured) - before

        run.step(microbatches, lambda x: loss_of(model, x))
        planner = run.fit.planner
        settle = planner.settle
        monkeypatch.setattr(planner, "settle", lambda *args, **options: (measured.append(1), settle(*args, **options)))
        assert steps(30, 1.0) == 0
        assert steps(10, 1.25) == 0
        assert steps(19, 1.35) == 0
        assert steps(1, 1.0) == 0  # not one after the other
        assert steps(20, 1.35) == 0
        assert steps(1, 1.35) == 1
        assert steps(100, 1.35) == 0  # they are usual now
        assert steps(40, 2.0) == 0
        assert steps(1, 2.0) == 1
        assert run.report().retries == 0
        assert steps(1, 2.0) == 0
        assert run.plan().measured is not None


def test_forecasts_have_the_seconds_of_updates_behind_the_next_forward() -> None:
    speed = 4e6  # of the host's memory: an update takes longer than all else
    model = Layered(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    device = SimulatedDevice(host_memory_bytes_per_second=speed)
    with hydra_ext.offload(model, optimizer_of(model), budget=200_000, device=device) as run:
        for _ in range(14):  # until two plans are timed
            run.step(data(2), lambda x: loss_of(model, x))
        plan, report = run.plan(), run.report()
    assert not report.homes
    update = report.update_bytes / report.deferred_updates / speed
    assert plan.lanes["optimizer"] >= 0.8 * update  # the last update is not over
    assert plan.seconds > 0.5 * update
    assert plan.binding == "optimizer"
