"""Consecutive children of an nn.Sequential are recomputed as one where that is faster, with the bits of a loop."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from hydra_ext.activations.groups import Span
from hydra_ext.calls import standing_in
from support.runtime.fitted import both, noted, optimizer_of

ROWS, SIZE, NARROW, WIDE, STEPS = 2, 24, 4, 16, 3
STAGE = 7  # children
BUDGET = 1_250_000
CRAWLING = SimulatedDevice(to_device_bytes_per_second=2e6, to_host_bytes_per_second=2e6)


def stage(act: nn.Module | None = None) -> list[nn.Module]:
    """What it takes and returns is a quarter of what is inside."""
    return [
        nn.Conv2d(NARROW, WIDE, 3, padding=1),
        nn.BatchNorm2d(WIDE),
        act or nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Conv2d(WIDE, WIDE, 3, padding=1),
        act or nn.ReLU(inplace=True),
        nn.Conv2d(WIDE, NARROW, 1),
    ]


def stages(act: nn.Module | None = None) -> list[nn.Module]:
    return [child for _ in range(4) for child in stage(act)]


def head() -> list[nn.Module]:
    return [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(NARROW * SIZE * SIZE // 16, 8)]


def flat() -> nn.Module:
    return nn.Sequential(*stages(), *head())


def with_one_act() -> nn.Module:
    """One module is called twice in each stage."""
    return nn.Sequential(*stages(nn.ReLU(inplace=True)), *head())


class Branched(nn.Module):
    """Calls children of its nn.Sequential elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*stages())
        self.head = nn.Sequential(*head())

    def forward(self, x: Tensor) -> Tensor:
        first = self.features[0](x)
        return self.head(self.features(x)) + first.mean()


class Nested(nn.Module):
    """Sequentials in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Sequential(*stage()[:3]), *stage()[3:], *stages()[STAGE:]]
        self.features = nn.Sequential(nn.Sequential(*inner))
        self.head = nn.Sequential(*head())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def batches(step: int, count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, NARROW, SIZE, SIZE, generator=draws) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), torch.arange(ROWS, device=x.device))


def seeds_of(step: int, count: int) -> list[int]:
    return [100 * step + number for number in range(count)]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, count: int) -> list[Tensor]:
    """One step of a loop."""
    losses = []
    for seed, x in zip(seeds_of(step, count), batches(step, count), strict=True):
        torch.manual_seed(seed)
        loss = loss_of(model, x)
        (loss / count).backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


# ---- groups that a plan chooses -------------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """By ``run.step`` where the model is offloaded."""
    run = model.__dict__.get("_hydra_ext_context")
    left = []
    for step in range(STEPS):
        if run is None:
            left += step_of(model, optimizer, step, 1)
        else:
            left += run.step(batches(step, 1), lambda x: loss_of(model, x), seeds=seeds_of(step, 1)).losses
    return left


@pytest.mark.full
@pytest.mark.parametrize("make", [flat, Branched])
def test_groups_are_recomputed_where_that_is_faster(make: Callable[[], nn.Module]) -> None:
    found = both(make, steps, budget=BUDGET, device=CRAWLING)
    assert found.equal
    assert found.profile is not None
    assert [name for name in found.recomputed if found.profile.place_of(name) is not None]
    assert found.second_calls > len(found.recomputed)  # more than the trials
    assert found.retries == 0


@pytest.mark.full
def test_a_plan_shows_its_groups() -> None:
    torch.manual_seed(0)
    model = flat()
    with hydra_ext.offload(model, optimizer_of(model), budget=BUDGET, device=CRAWLING) as run:
        for step in range(2):
            run.step(batches(step, 1), lambda x: loss_of(model, x))
        plan = run.plan()
    again = [each for each in plan.segments if each.choice.startswith("recompute") and ":" in each.name]
    assert again
    for each in again:
        assert each.saved_bytes > 0
        assert each.seconds > 0
    assert re.search(r"^\[[0-9*]+:[0-9*]+\] .* recompute", str(plan), re.MULTILINE)


# ---- groups that are given ------------------------------------------------------------------------------------------


class Training:
    """Steps of a model, plain or offloaded with groups of its own.

    Args:
        spans: The groups, of the module of this name.
        prepare: Called with the model before each step, and the step's number.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        spans: list[tuple[str, int, int]],
        *,
        size: int = 1,
        prepare: Callable[[nn.Module, int], None] = lambda model, step: None,
    ) -> None:
        self.again: list[int] = []  # second calls, after each step
        self.left = [self._train(make, spans, size, prepare, offloaded=offloaded) for offloaded in (False, True)]

    def _train(
        self,
        make: Callable[[], nn.Module],
        spans: list[tuple[str, int, int]],
        size: int,
        prepare: Callable[[nn.Module, int], None],
        *,
        offloaded: bool,
    ) -> list[Tensor]:
        torch.manual_seed(0)
        model = make().train()
        optimizer, count, losses = optimizer_of(model), 4, []
        if not offloaded:
            for step in range(STEPS):
                prepare(model, step)
                losses += step_of(model, optimizer, step, count)
            return [*losses, *noted(model).values()]
        checks = Checks(poison_hosts=True)
        device = SimulatedDevice(asynchronous=True)
        with hydra_ext.offload(model, optimizer, budget=2**24, device=device, checks=checks) as run:
            assert run._saving is not None
            chosen = [Span(model.get_submodule(name), first, end) for name, first, end in spans]
            run._saving.recompute(chosen, run.device)
            for step in range(STEPS):
                prepare(model, step)
                made = run.step(
                    batches(step, count),
                    lambda x: loss_of(model, x),
                    seeds=seeds_of(step, count),
                    round_size=size,
                    recompute=False,
                )
                losses += made.losses
                report = run.report()
                assert report.activations is not None
                self.again.append(report.activations.recomputed)
            assert (report.retries, report.refusals) == (0, 0)
        return [*losses, *noted(model).values()]

    @property
    def equal(self) -> bool:
        return all(map(torch.equal, *self.left))


GIVEN = {
    flat: [("", 0, STAGE), ("", STAGE, 2 * STAGE), ("", 2 * STAGE, 4 * STAGE)],
    with_one_act: [("", 0, STAGE), ("", STAGE + 3, 3 * STAGE)],
    Branched: [("features", 0, STAGE), ("features", STAGE, 3 * STAGE)],
    Nested: [("features.0", 0, 5), ("features.0", 5, 12), ("features.0.0", 0, 2)],
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", GIVEN)
def test_groups_have_the_bits_of_a_loop(make: Callable[[], nn.Module], size: int) -> None:
    done = Training(make, GIVEN[make], size=size)
    assert done.equal
    assert done.again[0] > 0
    assert done.again[2] - done.again[1] == 4 * len(GIVEN[make]) - (4 if make is Nested else 0)  # one is in another


def test_hooks_of_children_run_as_those_of_a_module_that_is_recomputed() -> None:
    calls: list[int] = []

    def make() -> nn.Module:
        model = flat()
        model[STAGE + 1].register_forward_hook(lambda *_: calls.append(0))
        return model

    done = Training(make, [("", STAGE, 2 * STAGE)])
    assert done.equal
    assert len(calls) == 2 * 4 * STEPS + done.again[-1]


def _with_hook(model: nn.Module, step: int, found: list[int]) -> None:
    if step == 1:
        model.register_forward_hook(lambda *_: found.append(step))


def _with_forward(model: nn.Module, step: int, found: list[int]) -> None:
    if step == 1:
        plain = model.forward

        def forward(x: Tensor) -> Tensor:
            found.append(step)
            return plain(x)

        model.forward = forward  # type: ignore[method-assign]


def _with_other_child(model: nn.Module, step: int, found: list[int]) -> None:
    if step == 1:
        assert isinstance(model, nn.Sequential)
        model[STAGE + 2] = nn.GELU()
    found += [step] * 4 if step else []


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", [_with_hook, _with_forward, _with_other_child])
def test_a_sequential_that_has_changed_runs_its_own_forward(
    change: Callable[[nn.Module, int, list[int]], None],
) -> None:
    found: list[int] = []
    done = Training(flat, [("", STAGE, 2 * STAGE)], prepare=lambda model, step: change(model, step, found))
    assert done.equal
    assert len(found) == 2 * 4 * (STEPS - 1)
    assert 0 < done.again[0] == done.again[-1]


def test_hooks_on_all_modules_see_no_groups() -> None:
    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        done = Training(flat, [("", STAGE, 2 * STAGE)])
    finally:
        handle.remove()
    assert done.equal
    assert done.again[-1] == 0
    assert len(seen) % 2 == 0
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_a_group_that_writes_to_its_input_is_found_by_a_trial() -> None:
    def make() -> nn.Module:
        model = flat()
        assert isinstance(model, nn.Sequential)
        model[STAGE + 3] = nn.Identity()
        return model

    done = Training(make, [("", STAGE + 5, 2 * STAGE)])  # begins with the ReLU that writes to what it is given
    assert done.equal
    assert done.again[-1] == 0


def test_a_copy_of_the_model_has_no_groups() -> None:
    torch.manual_seed(0)
    model = flat()
    with hydra_ext.offload(model, optimizer_of(model), budget=2**24, device=SimulatedDevice()) as run:
        assert run._saving is not None
        run._saving.recompute([Span(model, 0, STAGE)], run.device)
        inside = copy.deepcopy(model)
    assert not [each for module in inside.modules() for each in standing_in(module)]
    assert not [each for module in model.modules() for each in standing_in(module)]
    assert [name for name, _ in inside.named_modules()] == [name for name, _ in flat().named_modules()]
