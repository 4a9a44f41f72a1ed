"""``run.step`` whose activations are fitted: every budget trains, and what fails is undone and tried in another way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import SimulatedDevice
from hydra_ext.runtime.fit import Rung
from hydra_ext.runtime.step_planner import StepPlanner
from support.rounds.rounds import assert_nothing_left
from support.rounds.running_out import LAYERS, Case, train_disturbed
from support.rounds.running_out import train_plain as train_undisturbed
from support.runtime.fitted import (
    MICROBATCHES,
    ROOMY,
    STEPS,
    SUBJECTS,
    Batch,
    Subject,
    fits,
    frugal,
    loss_of,
    noted,
    optimizer_of,
    seeds_of,
    smallest,
    train,
    train_plain,
)

SLOW = 5e7  # bytes a second


# ---- every budget that is enough ------------------------------------------------------------------------------------


@cache
def least_by_hand(name: str, factor: float = 1) -> int:
    """The smallest budget, with ``factor`` times the rows."""
    return smallest(lambda budget: frugal(resized_subject(name, factor), budget), 2**15, 2**22)


def device_of(number: int) -> SimulatedDevice:
    """Of several kinds, in turn."""
    speed = (None, SLOW, 4 * SLOW)[number % 3]
    return SimulatedDevice(
        asynchronous=number % 2 == 1, seed=number, to_device_bytes_per_second=speed, to_host_bytes_per_second=speed
    )


def failures(subject: Subject, budgets: list[int]) -> list[str]:
    """What differs from plain PyTorch, or raises."""
    plain, found = train_plain(subject), []
    for number, budget in enumerate(budgets):
        for looped in (False, True):
            case = f"{budget} in a {'loop' if looped else 'step'}"
            try:
                left = train(subject, budget, looped=looped, device=device_of(number), after_step=assert_nothing_left)
            except torch.OutOfMemoryError as error:
                found.append(f"{case}: {error}")
                continue
            found += [f"{case}: {name} differs" for name in left.differences(plain)]
            found += [f"{case}: retries {left.retries}"] if left.retries[-1] > left.retries[0] else []
            assert left.report is not None
            assert left.report.peak_bytes <= budget
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "convolutions"])
def test_the_smallest_budget_is_that_of_settings_by_hand(name: str) -> None:
    assert failures(SUBJECTS[name], [int(1.1 * least_by_hand(name))]) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_budget_above_trains_as_plain_pytorch(name: str) -> None:
    assert failures(SUBJECTS[name], [int(1.6 * least_by_hand(name))]) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_one_of_many_budgets_trains_as_plain_pytorch(name: str) -> None:
    least = 1.1 * least_by_hand(name)
    assert failures(SUBJECTS[name], [*(int(1.35**power * least) for power in range(12)), ROOMY]) == []


class Tied(nn.Module):
    """A language model whose head is its embedding. Autograd holds the weight's gradient from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 96)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 640), nn.GELU(), nn.Linear(640, 96)) for _ in range(3)
        )
        self.head = nn.Linear(96, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_a_weight_that_is_used_twice_trains_with_less_than_a_loop_needs() -> None:
    subject = Subject(Tied, SUBJECTS["tied"].batch)
    model = subject.make()
    least = hydra_ext.plan.fit(model, subject.batches(1)[0], partial(loss_of, model)).least_bytes
    budget = least - model.head.weight.nbytes // 2
    with pytest.raises(torch.OutOfMemoryError):
        train(subject, budget, looped=True)
    left = train(subject, budget)
    assert not left.differences(train_plain(subject))
    assert 0 < left.retries[0] <= 2
    assert left.retries[-1] == left.retries[0]


def test_what_is_far_too_small_is_told_and_not_tried_for_ever() -> None:
    assert not fits(lambda budget: train(SUBJECTS["tied"], budget), least_by_hand("tied") // 2)


@pytest.mark.parametrize("looped", [False, True])
def test_the_error_says_what_is_needed_and_nothing_that_was_tried_already(looped: bool) -> None:
    model = Scaled()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    data = torch.randn(4096, 32)

    def step(run: hydra_ext.Run) -> None:
        if looped:
            model(data).sum().backward()
        else:
            run.step([data], lambda x: model(x).sum())

    with (
        hydra_ext.offload(model, optimizer_of(model), budget=weights + data.nbytes, device=SimulatedDevice()) as run,
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        step(run)
    text = str(caught.value)
    for part in ("this moment needs", "Raise the budget; or shrink the batch", "round_size="):
        assert part in text
    for part in ("Offload()", "Recompute()", "recompute=True"):
        assert part not in text


# ---- batches that change --------------------------------------------------------------------------------------------


def resized(batches: list[Batch], factor: float) -> list[Batch]:
    """With more or fewer rows."""

    def one(value: Tensor) -> Tensor:
        return torch.cat([value, value]) if factor > 1 else value[: int(factor * len(value))]

    return [{name: one(value) for name, value in batch.items()} for batch in batches]


def resized_subject(name: str, factor: float) -> Subject:
    subject = SUBJECTS[name]
    return Subject(subject.build, lambda generator: resized([subject.batch(generator)], factor)[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("factor", [2, 0.5])
@pytest.mark.parametrize("share", [1.2, *(pytest.param(share, marks=pytest.mark.full) for share in (1.1, 2, 4))])
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.full), "convolutions"])
def test_batches_that_change_cost_few_retries_once(name: str, share: float, factor: float) -> None:
    subject = SUBJECTS[name]
    batches = subject.batches(7 * MICROBATCHES)
    first = 2 * MICROBATCHES
    changed = [*batches[:first], *resized(batches[first:], factor)]
    device = SimulatedDevice(to_device_bytes_per_second=2 * SLOW, to_host_bytes_per_second=2 * SLOW)
    left = train(subject, int(share * least_by_hand(name, max(1, factor))), batches=changed, device=device)
    assert left.differences(train_plain(subject, changed)) == []
    assert left.retries[-1] - left.retries[1] <= (3 if factor > 1 else 1)
    assert left.retries[-1] == left.retries[-2]


# ---- memory that runs out -------------------------------------------------------------------------------------------

OPTIONS = ({}, {"scaler": True}, {"before": True}, {"optimizer": "torch"}, {"home": "device"})


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("block", range(LAYERS + 1))
def test_a_step_is_undone_wherever_memory_runs_out(block: int, where: str, tmp_path: Path) -> None:
    """Layers have BatchNorm, dropout, lists, and tensors that are no buffers; a leaf outside gets its gradient."""
    options: dict[str, Any] = OPTIONS[block]
    case = Case(where=where, block=block, at=(2,), **options)
    left, report = train_disturbed(case, tmp_path)
    assert left.differences(train_undisturbed(case)) == []
    assert report.retries == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_leaf_outside_of_the_model_has_its_gradient_once(size: int | None, trained: bool) -> None:
    """Also where microbatches run one after the other: its gradients of those before the failing one are undone."""
    data = list(torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)))
    left = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model, outside = Scaled(), nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([*model.parameters(), *([outside] if trained else [])], lr=0.1)

        left_until, armed = [3], [False]  # the third microbatch of the second step, in its backward

        def fn(
            x: Tensor,
            model: nn.Module = model,
            outside: Tensor = outside,
            left_until: list[int] = left_until,
            armed: list[bool] = armed,
        ) -> Tensor:
            output = model(x)
            left_until[0] -= armed[0]
            if armed[0] and left_until[0] == 0:
                output.register_hook(_out_of_memory)  # the leaf has its gradient by then
            return functional.cross_entropy(output * outside, torch.arange(len(x)) % 8)

        if not offloaded:
            for _ in range(3):
                for x in data:
                    (fn(x) / len(data)).backward()
                optimizer.step()
                model.zero_grad()
                if trained:
                    outside.grad = None
        else:
            with hydra_ext.offload(model, optimizer, budget=2**20, device=SimulatedDevice()) as run:
                for fails in (False, True, False):
                    armed[0] = fails
                    run.step(data, fn, round_size=size)
                assert run.report().retries == 1
        left.append(
            [*noted(model).values(), outside.detach(), torch.zeros(8) if outside.grad is None else outside.grad]
        )
    assert all(map(torch.equal, *left))


def _out_of_memory(_gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("scripted: the device is out of memory.")


# ---- budgets without a plan -----------------------------------------------------------------------------------------


def test_where_no_plan_fits_saved_tensors_stay_until_their_memory_is_needed() -> None:
    subject, rungs = SUBJECTS["gpt2"], list[Rung]()

    def after_step(run: hydra_ext.Run) -> None:
        assert run.fit is not None
        rungs.append(run.fit._steps.rung)

    left = train(subject, int(1.02 * least_by_hand("gpt2")), after_step=after_step)
    assert left.differences(train_plain(subject)) == []
    assert rungs == [Rung.LOOSE] * STEPS
    assert left.retries == [0] * STEPS
    assert left.report is not None
    assert left.report.activations is not None
    assert left.report.activations.prefetched > 0  # the frugal way has none


@pytest.mark.parametrize("failing", [0, 2])
def test_a_round_without_a_plan_that_fails_is_the_last_but_the_frugal_ones(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepPlanner, "plan", lambda *_, **__: None)
    seen = list[tuple[Rung, int]]()

    def fails(step: int, rung: Rung) -> bool:
        seen.append((rung, step))
        return rung is Rung.LOOSE and step >= failing

    assert undone(30, 2, fails) == {failing: 1}
    assert (Rung.LOOSE, failing - 1) in seen or failing == 0
    assert (Rung.FRUGAL, 29) in seen


# ---- steps after those that fail ------------------------------------------------------------------------------------


def undone(steps: int, microbatches: int, fails: Callable[[int, Rung], bool]) -> dict[int, int]:
    """Makes steps that run out of memory in backward as ``fails`` says. Returns each one's undone rounds, if any."""
    torch.manual_seed(0)
    model, found = Scaled(), {}
    data = list(torch.randn(microbatches, 16, 32))

    def fn(x: Tensor) -> Tensor:
        loss = model(x).sum()
        if fails(step, fit._steps.rung):
            loss.register_hook(_out_of_memory)
        return loss

    with hydra_ext.offload(model, optimizer_of(model), budget=2**20, device=SimulatedDevice()) as run:
        fit = run.fit
        assert fit is not None
        for step in range(steps):
            before = run.report().retries
            run.step(data, fn)
            found[step] = run.report().retries - before
    return {step: retries for step, retries in found.items() if retries}


def test_steps_in_pieces_are_looked_at_again_after_forty_and_after_eighty() -> None:
    assert undone(124, 1, lambda _, rung: rung is not Rung.IN_PIECES) == {0: 1, 41: 1, 122: 1}


@pytest.mark.parametrize(("planned", "then"), [(0, {42: 2, 42 + 81: 1}), (1, {43: 2, 43 + 41: 1})])
def test_a_whole_step_that_goes_as_planned_ends_the_doubling(planned: int, then: dict[int, int]) -> None:
    """A microbatch that was measured well does not: the plan that it brings may fail."""
    well = range(41, 42 + planned)
    fails = lambda step, rung: step not in well and rung in (Rung.MEASURED, Rung.PLANNED)  # noqa: E731
    assert undone(124, 1, fails) == {0: 1, **then}


@pytest.mark.parametrize("planned", [0, 1])
def test_after_two_steps_that_no_plan_ends_the_next_twenty_have_none(planned: int) -> None:
    """Then one is measured, and likewise again. A whole step that goes as planned gives two more."""
    well = range(22, 23 + planned)
    fails = lambda step, rung: step not in well and rung is Rung.PLANNED  # noqa: E731
    then = {24: 3, 25: 3, 46: 3} if planned else {23: 3, 44: 3}
    assert undone(48, 2, fails) == {0: 3, 1: 3, **then}


def test_plans_that_fail_once_in_each_step_are_given_up_likewise() -> None:
    """With one microbatch a step, the one that is measured after a failure ends the step."""
    fails = lambda _, rung: rung is Rung.PLANNED  # noqa: E731
    assert undone(32, 1, fails) == dict.fromkeys([1, 2, 3, 5, 6, 7, 29, 30, 31], 1)


# ---- what the user gives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, MICROBATCHES])
def test_a_size_of_rounds_that_is_given_is_kept_to(size: int) -> None:
    subject = SUBJECTS["tied"]
    left = train(subject, 2**22, round_size=size)
    assert left.differences(train_plain(subject)) == []
    assert left.report is not None
    assert left.report.rounds == STEPS * -(-MICROBATCHES // size)


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_whether_blocks_are_recomputed_is_as_given(recompute: bool) -> None:
    subject = SUBJECTS["tied"]
    device = SimulatedDevice(to_device_bytes_per_second=2e7, to_host_bytes_per_second=2e7)
    budget = 950_000  # with which a plan would call most layers again on such a link
    by_default = train(subject, budget, device=device)
    left = train(subject, budget, device=device, recompute=recompute)
    assert left.differences(train_plain(subject)) == by_default.differences(train_plain(subject)) == []
    assert by_default.report is not None
    assert by_default.report.activations is not None
    assert by_default.report.activations.recomputed > 0
    assert left.report is not None
    assert left.report.activations is not None
    assert recompute or left.report.activations.recomputed == 0


@pytest.mark.full
def test_layers_around_several_blocks_are_called_again_in_rounds() -> None:
    """As the policy says, once for each microbatch, with less on the device."""
    subject = SUBJECTS["gpt2"]
    peaks = []
    for policy in (hydra_ext.Keep(), hydra_ext.Recompute()):
        model = subject.make()
        optimizer = optimizer_of(model)
        with hydra_ext.offload(
            model,
            optimizer,
            budget=2**24,
            device=SimulatedDevice(),
            activations={"": hydra_ext.Keep(), "transformer.h.*": policy},
        ) as run:
            assert len(run.layout.sites) > 4 * 4  # four layers, each around several
            batches = subject.batches(STEPS * MICROBATCHES)
            for step in range(STEPS):
                given = batches[step * MICROBATCHES : (step + 1) * MICROBATCHES]
                run.step(given, partial(loss_of, model), seeds=seeds_of(step), round_size=4, recompute=False)
            report = run.report()
        assert report.activations is not None
        assert report.activations.recomputed == (4 * STEPS * MICROBATCHES if policy == hydra_ext.Recompute() else 0)
        assert (report.rounds, report.refusals, report.fallbacks) == (STEPS, 0, 0)
        peaks.append(report.peak_activations_bytes)
        plain = train_plain(subject).state
        assert all(torch.equal(value, plain[name]) for name, value in noted(model).items())
    assert peaks[1] < peaks[0] / 1.5
