"""Steps whose microbatches are of other sizes than before: each size has a plan of its own, and equal bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ext
from hydra_ext import Checks, Compress, SimulatedDevice
from hydra_ext.profile import Profile
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.runtime.rounds.microbatch import Work
from hydra_ext.runtime.step_planner import PlannedStep, StepPlanner
from support.runtime.fitted import (
    MICROBATCHES,
    SUBJECTS,
    Batch,
    Left,
    loss_of,
    noted,
    optimizer_of,
    seeds_of,
    steps_of,
    train_plain,
)

SMALL, LARGE = 1, 4  # times the usual rows
TIGHT = 1_400_000
Loss = Callable[[Batch], Tensor]
SIZES = [SMALL, LARGE, SMALL, SMALL, LARGE, SMALL]  # of the steps


def batches_of(name: str) -> list[Batch]:
    usual = iter(SUBJECTS[name].batches(len(SIZES) * MICROBATCHES))
    return [
        {key: torch.cat([value] * size) for key, value in next(usual).items()}
        for size in SIZES
        for _ in range(MICROBATCHES)
    ]


def trained(name: str, budget: int, **small_choices: Any) -> tuple[Left, list[PlannedStep | None]]:
    """A training, with choices for the steps of small microbatches, and the plan of each step."""
    plans: list[PlannedStep | None] = []
    model, left = SUBJECTS[name].make(), Left()
    options: Any = {"device": SimulatedDevice(), "checks": Checks(poison_hosts=True)}
    with hydra_ext.offload(model, optimizer_of(model), budget=budget, **options) as run:
        assert run.fit is not None
        for step, given in enumerate(steps_of(batches_of(name))):
            choices = small_choices if SIZES[step] == SMALL else {}
            out = run.step(given, lambda batch: loss_of(model, batch), seeds=seeds_of(step), **choices)
            left.losses += out.losses
            left.retries.append(run.report().retries)
            plans.append(run.fit.applied)
    left.state = noted(model)
    return left, plans


def alike(plans: list[PlannedStep | None], size: int) -> list[PlannedStep | None]:
    """The plans of steps of one size."""
    return [plan for plan, each in zip(plans, SIZES, strict=True) if each == size]


def saved_bytes(profile: Profile | None) -> int:
    """Of a microbatch."""
    assert profile is not None
    return profile.modules[""].saved.fresh


@pytest.mark.parametrize(("name", "budget"), [("convolutions", 5_000_000), ("tied", 2_500_000)])
def test_each_size_has_a_plan_and_no_step_fails_when_they_change(name: str, budget: int) -> None:
    left, plans = trained(name, budget)
    assert not left.differences(train_plain(SUBJECTS[name], batches_of(name)))
    assert left.retries[-1] == 0
    (small,), (large,) = (
        {saved_bytes(plan.problem.profile) for plan in alike(plans, size) if plan is not None}
        for size in (SMALL, LARGE)
    )
    assert None not in plans
    assert large == pytest.approx(LARGE * small, rel=0.01)


@pytest.mark.parametrize("sizes", [(1, 4, 4, 4), (1, 2, 4, 1), (4, 1, 1, 1), (2, 1, 4, 2)], ids=str)
@pytest.mark.parametrize(("name", "budget"), [("convolutions", 5_000_000), ("tied", 2_500_000)])
def test_the_largest_microbatch_of_a_step_is_the_one_that_counts(
    name: str, budget: int, sizes: tuple[int, ...]
) -> None:
    usual = iter(SUBJECTS[name].batches(5 * MICROBATCHES))
    batches = [
        {key: torch.cat([value] * size) for key, value in next(usual).items()} for _ in range(5) for size in sizes
    ]
    model, left = SUBJECTS[name].make(), Left()
    largest = batches[sizes.index(max(sizes))]
    foreseen = dry_run(model, largest, lambda batch: loss_of(model, batch))
    options: Any = {"device": SimulatedDevice(), "checks": Checks(poison_hosts=True)}
    with hydra_ext.offload(model, optimizer_of(model), budget=budget, **options) as run:
        for step, given in enumerate(steps_of(batches)):
            left.losses += run.step(given, lambda batch: loss_of(model, batch), seeds=seeds_of(step)).losses
        report = run.report()
        assert run.fit is not None
        profile = run.fit.planner.profile
    left.state = noted(model)
    assert not left.differences(train_plain(SUBJECTS[name], batches))
    assert report.retries == 0
    assert saved_bytes(profile) == pytest.approx(saved_bytes(foreseen), rel=0.05)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was made to measure a microbatch."""
    made: list[object] = []
    measure = StepPlanner.measure

    def noted_measure(planner: StepPlanner) -> object:
        made.append(measure(planner))
        return made[-1]

    monkeypatch.setattr(StepPlanner, "measure", noted_measure)
    return made


@contextmanager
def offloaded(budget: int = 2**24, activations: Any = "auto") -> Iterator[tuple[hydra_ext.Run, Loss]]:
    """A model that is trained, and the loss of a batch."""
    model = SUBJECTS["tied"].make()
    options: Any = {"device": SimulatedDevice(), "checks": Checks(poison_hosts=True), "activations": activations}
    with hydra_ext.offload(model, optimizer_of(model), budget=budget, **options) as run:
        yield run, lambda batch: loss_of(model, batch)


def assert_measured(run: hydra_ext.Run, batch: Batch) -> None:
    """The last microbatch that was measured is like this one, and was called once."""
    assert run.fit is not None
    profile = run.fit.planner.profile
    model = SUBJECTS["tied"].make()
    foreseen = dry_run(model, batch, lambda given: loss_of(model, given))
    assert saved_bytes(profile) == pytest.approx(saved_bytes(foreseen), rel=0.01)
    assert profile is not None
    assert {figures.calls for name, figures in profile.modules.items() if name.startswith("layers.")} == {1}


def measured_bytes(run: hydra_ext.Run) -> int:
    """Of what a microbatch saves, by the figures of steps as they are now."""
    assert run.fit is not None
    return saved_bytes(run.fit.planner.profile)


@pytest.mark.parametrize(("name", "budget"), [("convolutions", 5_000_000), ("tied", 2_500_000)])
def test_each_size_of_a_loop_has_a_plan(name: str, budget: int, measurements: list[object]) -> None:
    model, left = SUBJECTS[name].make(), Left()
    optimizer, options = optimizer_of(model), {"device": SimulatedDevice(), "checks": Checks(poison_hosts=True)}
    measured: list[list[int]] = [[], []]
    with hydra_ext.offload(model, optimizer, budget=budget, **options) as run:
        for step, given in enumerate(steps_of(batches_of(name))):
            for number, (batch, seed) in enumerate(zip(given, seeds_of(step), strict=True)):
                torch.manual_seed(seed)
                loss = loss_of(model, batch)
                (loss / MICROBATCHES).backward()
                left.losses.append(loss.detach())
                measured[SIZES[step] == LARGE].append(measured_bytes(run))
                assert run.fit is not None
                assert run.fit.applied is not None or (SIZES.index(SIZES[step]) == step and number == 0)
            optimizer.step()
            optimizer.zero_grad()
    left.state = noted(model)
    assert not left.differences(train_plain(SUBJECTS[name], batches_of(name)))
    (small,), (large,) = map(set, measured)
    assert large == pytest.approx(LARGE * small, rel=0.01)
    assert len(measurements) == 2


def test_forwards_of_one_backward_have_one_plan(measurements: list[object]) -> None:
    small, large = batches_of("tied")[0], batches_of("tied")[MICROBATCHES]
    with offloaded() as (run, fn):
        fit, plans = run.fit, []
        assert fit is not None
        for _ in range(3):
            losses = []
            for batch in (small, large, small):
                losses.append(fn(batch))
                plans.append(fit.applied)
            torch.stack(losses).sum().backward()
    assert plans[:3] == [None] * 3
    assert plans[3] is not None
    assert all(plan is plans[3] for plan in plans[3:])
    assert len(measurements) == 1


def test_a_forward_that_raises_leaves_no_size(measurements: list[object]) -> None:
    small, large = batches_of("tied")[0], batches_of("tied")[MICROBATCHES]
    with offloaded() as (run, fn):
        with pytest.raises(IndexError):
            fn({"tokens": torch.full_like(large["tokens"], 10**6)})
        fn(small).backward()
        of_small = measured_bytes(run)
        fn(large).backward()
        assert measured_bytes(run) == pytest.approx(LARGE * of_small, rel=0.01)
    assert len(measurements) == 3


def test_of_microbatches_within_a_power_of_two_the_largest_is_measured() -> None:
    usual = batches_of("tied")[0]
    smaller, larger = ({"tokens": torch.cat([usual["tokens"]] * times)} for times in (3, 5))
    with offloaded() as (run, fn):
        run.step([smaller, larger, smaller], fn)
        assert_measured(run, larger)


def test_a_microbatch_after_one_that_was_measured_and_raised_is_not_measured() -> None:
    small, large = batches_of("tied")[0], batches_of("tied")[MICROBATCHES]

    def raises(batch: Batch) -> Tensor:
        fn(batch)
        raise KeyError("of the user")

    with offloaded() as (run, fn):
        with pytest.raises(KeyError, match="of the user"):
            run.step([large], raises)
        run.step([small, large], fn)
        assert_measured(run, large)


def test_a_microbatch_after_one_that_only_taught_the_bounds_is_not_measured() -> None:
    small, large = batches_of("tied")[0], batches_of("tied")[MICROBATCHES]
    with offloaded(activations={"": "auto", "layers.*": Compress()}) as (run, fn):
        run.step([large], fn)
        run.step([small, large], fn)
        assert_measured(run, large)


def test_after_a_failure_behind_the_largest_microbatch_that_of_the_next_step_is_measured() -> None:
    small, large = batches_of("tied")[0], batches_of("tied")[MICROBATCHES]
    calls = [0]

    def fails(batch: Batch) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("scripted: the device is out of memory.")
        return fn(batch)

    with offloaded() as (run, fn):
        run.step([large, small], fails)
        assert run.report().retries == 1
        assert_measured(run, large)
        run.step([large, small], fn)
        assert run.fit is not None
        assert run.fit.applied is not None
        assert_measured(run, large)


def test_a_loop_that_no_plan_fits_runs_the_frugal_way_after_steps_that_have_a_plan() -> None:
    small, large = batches_of("tied")[:MICROBATCHES], batches_of("tied")[MICROBATCHES]
    with offloaded(TIGHT) as (run, fn):
        fit = run.fit
        assert fit is not None
        for _ in range(2):
            fn(large).backward()
            assert fit.applied is None
        for _ in range(2):
            run.step(small, fn)
        assert fit.applied is not None
        fn(large).backward()
        assert fit.applied is None


def test_what_is_given_holds_after_a_plan_for_another_size() -> None:
    left, plans = trained("tied", 2_500_000, round_size=2)
    assert not left.differences(train_plain(SUBJECTS["tied"], batches_of("tied")))
    assert left.retries[-1] == 0
    assert alike(plans, SMALL) == [None] * SIZES.count(SMALL)
    assert None not in alike(plans, LARGE)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_microbatch_has_the_same_figures_whatever_ran_before(steps_before: int) -> None:
    """Other steps, which keep what they save, take more memory, and are no part of them."""
    small, large = batches_of("tied")[:MICROBATCHES], batches_of("tied")[MICROBATCHES]
    torch.manual_seed(0)
    model = SUBJECTS["tied"].make()
    foreseen = dry_run(model, large, lambda batch: loss_of(model, batch))
    with hydra_ext.offload(model, optimizer_of(model), budget=4_000_000, device=SimulatedDevice()) as run:
        for _ in range(steps_before):
            run.step(small, lambda batch: loss_of(model, batch), round_size=2)
        run.step([large], lambda batch: loss_of(model, batch))
        assert run.fit is not None
        profile = run.fit.planner.profile
    assert profile is not None
    for name in ("", "layers.0", "layers.3"):
        measured, dry = profile.modules[name], foreseen.modules[name]
        assert measured.forward_bytes == pytest.approx(dry.forward_bytes, rel=0.02), name
        assert measured.backward_bytes == pytest.approx(dry.backward_bytes, rel=0.05), name


@pytest.mark.parametrize("is_left", [False, True])
def test_a_forward_that_is_measured_and_left_measures_no_step(is_left: bool) -> None:
    """A loop's forward has no backward before a step is made, and another one is measured."""
    small, large = batches_of("tied")[:MICROBATCHES], batches_of("tied")[MICROBATCHES]
    torch.manual_seed(0)
    model = SUBJECTS["tied"].make()
    device, checks = SimulatedDevice(), Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer_of(model), budget=2_500_000, device=device, checks=checks) as run:
        fit = run.fit
        assert fit is not None
        for forward_is_left in (False, is_left):
            if forward_is_left:
                loss_of(model, large)
            run.step(small, lambda batch: loss_of(model, batch))
        of_steps = fit.planner.profile
        assert fit.applied is not None
        loss_of(model, large).backward()
        of_loop = fit.planner.profile
        loss_of(model, large).backward()
        assert fit.applied is not None
    assert saved_bytes(of_loop) == pytest.approx(LARGE * saved_bytes(of_steps), rel=0.01)


@dataclass
class Linked:
    x: Tensor
    other: list[Linked]


class Drawing(Mapping[str, Tensor]):
    """Draws what it gives, each time that it is asked."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.rand(2, 3)

    def __iter__(self) -> Iterator[str]:
        return iter("x")

    def __len__(self) -> int:
        return 1


def test_a_microbatch_of_any_depth_is_searched_without_code_of_the_user() -> None:
    one = Linked(torch.zeros(2, 3), [])
    one.other.append(Linked(torch.zeros(4), [one]))
    circle: dict[str, Any] = {"x": (torch.zeros(5), deque([torch.zeros(1)]))}
    circle["self"] = circle
    chain: list[Any] = [torch.zeros(7)]
    for _ in range(3000):
        chain = [chain]
    state = torch.get_rng_state()
    sizes = [Work(lambda _: torch.zeros(()), each, 1, None).nbytes for each in (one, circle, chain, Drawing(), 3)]
    assert sizes == [40, 24, 28, 0, 0]
    assert torch.equal(torch.get_rng_state(), state)
