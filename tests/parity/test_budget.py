"""The budget is a limit to the byte: never passed, found by bisection; one byte less is an error to go on from."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hydra_ext import _C
from hydra_ext.errors import BudgetTooSmall
from support.models.zoo import FAMILIES
from support.runtime.offloaded import gradient_bytes, offloaded
from support.training import STEPS, Recipe, build, build_optimizer, differences, parameter_bytes, plain_peak, train

GPT2 = FAMILIES["gpt2"]
CHECKPOINTING = {"kept activations": Recipe(), "checkpointed": Recipe(checkpointing="plain")}


def _generous(recipe: Recipe) -> int:
    return plain_peak(GPT2, recipe) + 110 * parameter_bytes(build(GPT2, recipe)) // 100


def _trained(recipe: Recipe) -> tuple[list[torch.Tensor], torch.nn.Module, torch.optim.Optimizer]:
    model = build(GPT2, recipe)
    optimizer = build_optimizer(model, recipe)
    return train(model, optimizer, GPT2, recipe), model, optimizer


def _passes(recipe: Recipe, budget: int) -> bool:
    model = build(GPT2, recipe)
    optimizer = build_optimizer(model, recipe)
    try:
        with offloaded(model, optimizer, budget=budget):
            train(model, optimizer, GPT2, recipe, steps=3)
    except (torch.OutOfMemoryError, BudgetTooSmall):
        return False
    return True


def _smallest(recipe: Recipe) -> int:
    fails, passes = 0, _generous(recipe)
    assert _passes(recipe, passes)
    while passes - fails > 1:
        middle = (passes + fails) // 2
        if _passes(recipe, middle):
            passes = middle
        else:
            fails = middle
    return passes


@pytest.fixture(scope="module")
def smallest() -> dict[str, int]:
    return {name: _smallest(recipe) for name, recipe in CHECKPOINTING.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_after_every_step_only_the_slots_are_left(family: str) -> None:
    recipe = Recipe()
    model = build(FAMILIES[family], recipe)
    optimizer = build_optimizer(model, recipe)
    budget = plain_peak(FAMILIES[family], recipe) + parameter_bytes(model) // 2
    with offloaded(model, optimizer, budget=budget) as observed:
        core = observed.run.core
        for step in range(4):
            train(model, optimizer, FAMILIES[family], recipe, steps=1, first=step)
            assert core.pager.resident_bytes > 0
            assert core.memory.ledger.in_use == core.pager.resident_bytes + core.memory.ledger.in_use_by(
                _C.MemoryClass.BUFFERS
            )
            assert core.memory.ledger.in_use_by(_C.MemoryClass.WEIGHTS) == core.pager.resident_bytes
            assert core.memory.ledger.peak <= budget


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_take_part_of_the_budget(family: str) -> None:
    recipe = Recipe()
    model = build(FAMILIES[family], recipe)
    optimizer = build_optimizer(model, recipe)
    budget = plain_peak(FAMILIES[family], recipe) + 2 * parameter_bytes(model)
    with offloaded(model, optimizer, budget=budget) as observed:
        train(model, optimizer, FAMILIES[family], recipe, steps=1)
        assert observed.run.report().peak_buffers_bytes == sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_with_room_for_all_the_peak_is_the_plain_step_the_slots_and_gradients_on_their_way(family: str) -> None:
    recipe = Recipe()
    model = build(FAMILIES[family], recipe)
    optimizer = build_optimizer(model, recipe)
    plain = plain_peak(FAMILIES[family], recipe, steps=3)
    with offloaded(model, optimizer, budget=plain + 3 * parameter_bytes(model)) as observed:
        train(model, optimizer, FAMILIES[family], recipe, steps=3)
        core = observed.run.core
        assert (
            plain + core.pager.resident_bytes
            <= core.memory.ledger.peak
            <= plain + core.pager.resident_bytes + gradient_bytes(model)
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CHECKPOINTING)
def test_the_smallest_budget_trains_as_plain_pytorch(
    smallest: dict[str, int], name: str, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = CHECKPOINTING[name]
    model = build(GPT2, recipe)
    optimizer = build_optimizer(model, recipe)
    with offloaded(model, optimizer, budget=smallest[name]) as observed:
        seen = train(model, optimizer, GPT2, recipe)
        report = observed.run.report()
    assert differences((seen, model, optimizer), _trained(recipe)) == []
    all_resident = plain_peak(GPT2, recipe) + parameter_bytes(model)
    record_property("smallest_budget", smallest[name])
    with capsys.disabled():
        print(f"\nGPT-2, {name}: {smallest[name]} bytes, {smallest[name] / all_resident:.0%} of {all_resident}")
    assert report.peak_bytes == smallest[name]
    assert smallest[name] < all_resident


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CHECKPOINTING)
def test_one_byte_less_explains_itself_and_training_goes_on_at_a_larger_budget(
    smallest: dict[str, int], name: str
) -> None:
    recipe = CHECKPOINTING[name]
    model = build(GPT2, recipe)
    optimizer = build_optimizer(model, recipe)
    with offloaded(model, optimizer, budget=smallest[name] - 1) as observed:
        with pytest.raises(torch.OutOfMemoryError, match=r"(?s)hydra_ext.*in slots: .*Raise the budget") as caught:
            train(model, optimizer, GPT2, recipe)
        del caught
        optimizer.zero_grad()
        assert observed.run.core.memory.ledger.in_use == observed.run.core.pager.resident_bytes
    with offloaded(model, optimizer, budget=_generous(recipe)):
        seen = train(model, optimizer, GPT2, recipe)
    assert differences((seen, model, optimizer), _trained(recipe)) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CHECKPOINTING)
def test_a_budget_lowered_between_steps_and_raised_again_changes_no_number(smallest: dict[str, int], name: str) -> None:
    recipe = CHECKPOINTING[name]
    model = build(GPT2, recipe)
    optimizer = build_optimizer(model, recipe)
    seen = []
    with offloaded(model, optimizer, budget=_generous(recipe)) as observed:
        for first in range(0, STEPS, 5):
            observed.run.core.memory.ledger.set_limit(_generous(recipe))
            seen += train(model, optimizer, GPT2, recipe, steps=5, first=first)
            observed.run.core.memory.ledger.set_limit(smallest[name] // 2)
            with pytest.raises(torch.OutOfMemoryError):
                train(model, optimizer, GPT2, recipe, steps=1)
            optimizer.zero_grad()
    assert differences((seen, model, optimizer), _trained(recipe)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKPOINTING)
def test_random_budgets_above_the_smallest_pass(smallest: dict[str, int], name: str) -> None:
    recipe = CHECKPOINTING[name]
    draw = random.Random(7)
    budgets = [draw.randint(smallest[name], _generous(recipe)) for _ in range(8)]
    assert [budget for budget in budgets if not _passes(recipe, budget)] == []
