"""Offloaded training equals plain training bit for bit: families x budgets x optimizers x what users do around them.

By default a sample in which every pair of choices meets, in a few steps; with the mark ``full`` many steps of that
sample and of every triple, and of the product of families, budgets, optimizers and one thing at a time that users do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import pytest

from support.models.zoo import FAMILIES
from support.pairwise import Row, covering_rows
from support.runtime.offloaded import gradient_bytes, offloaded, updated_bytes
from support.training import (
    STEPS,
    Recipe,
    build,
    build_optimizer,
    differences,
    parameter_bytes,
    plain_peak,
    something_follows,
    train,
)

CHOICES: dict[str, list[Any]] = {
    "family": list(FAMILIES),
    "percent": [25, 50, 110],
    "optimizer": ["sgd", "adamw", "adafactor"],
    "accumulate": [1, 2],
    "clip": [False, True],
    "checkpointing": ["no", "plain", "reentrant"],
    "autocast": [False, True],
    "between": ["nothing", "evaluation", "generation"],
    "tuning": ["all", "half", "adapters"],
}
USUAL = {name: values[0] for name, values in CHOICES.items()}
ROOM_FOR_ALL = 110
FEW_STEPS = 8  # with work between steps after the second and the seventh


@dataclass(frozen=True)
class Case:
    """A family, a recipe, and room for so many percent of the parameters beside the plain step's own peak."""

    family: str
    percent: int
    recipe: Recipe

    def __str__(self) -> str:
        usual = {**USUAL, "optimizer": self.recipe.optimizer}
        unusual = [f"{key}={value}" for key, value in asdict(self.recipe).items() if value != usual[key]]
        return "-".join((self.family, f"{self.percent}%", self.recipe.optimizer, *unusual))

    def budget(self) -> int:
        parameters = parameter_bytes(build(FAMILIES[self.family], self.recipe))
        return plain_peak(FAMILIES[self.family], self.recipe) + self.percent * parameters // 100


def _allowed(row: Row) -> bool:
    if row.get("between") == "generation" and "family" in row and FAMILIES[row["family"]].prompt is None:
        return False
    # Reentrant checkpointing needs an input that requires a gradient: plain PyTorch trains nothing without.
    return not (row.get("checkpointing") == "reentrant" and row.get("tuning", "all") != "all")


def _case(row: Row) -> Case:
    recipe = {name: value for name, value in row.items() if name not in ("family", "percent")}
    return Case(row["family"], row["percent"], Recipe(**recipe))


def _one_at_a_time() -> list[Case]:
    changes = [(name, value) for name in list(CHOICES)[3:] for value in CHOICES[name][1:]]
    rows = [
        {**USUAL, "family": family, "percent": percent, "optimizer": optimizer, **dict([change] if change else [])}
        for family, percent, optimizer in product(FAMILIES, CHOICES["percent"], CHOICES["optimizer"])
        for change in (None, *changes)
    ]
    return [_case(row) for row in rows if _allowed(row)]


PAIRS, TRIPLES = (
    [_case(row) for row in covering_rows(CHOICES, strength=strength, allowed=_allowed)] for strength in (2, 3)
)
REST = [case for case in dict.fromkeys((*_one_at_a_time(), *TRIPLES)) if case not in PAIRS]


def check_equal_to_plain(case: Case, steps: int, *, fault_path: bool = True) -> None:
    """Trains twice and compares everything; then what the report of the offloaded run has to say."""
    family, recipe = FAMILIES[case.family], case.recipe
    plain = build(family, recipe)
    plain_optimizer = build_optimizer(plain, recipe)
    reference = train(plain, plain_optimizer, family, recipe, steps=steps)

    budget = case.budget()
    model = build(family, recipe)
    optimizer = build_optimizer(model, recipe)
    with offloaded(model, optimizer, budget=budget, fault_path=fault_path) as observed:
        seen = train(model, optimizer, family, recipe, steps=steps, after_step=observed.note)
        assert differences((seen, model, optimizer), (reference, plain, plain_optimizer)) == []
        assert len(observed.reports) == steps
        _check_reports(case, observed.reports, updated=updated_bytes(observed.run), gradients=gradient_bytes(model))
        assert observed.run.core.blocks.foreign_bytes == 0
    assert differences((seen, model, optimizer), (reference, plain, plain_optimizer)) == []
    assert observed.run.core.memory.ledger.in_use == 0


def _check_reports(case: Case, reports: list[Any], *, updated: int, gradients: int) -> None:
    first, last = reports[0], reports[-1]
    assert last.windows >= 2 * len(reports) * case.recipe.accumulate
    assert last.peak_bytes <= last.budget_bytes
    assert last.faults == first.faults, "faults after the first step"
    if case.recipe.between == "nothing":
        assert last.order_changes == first.order_changes
    if case.percent != ROOM_FOR_ALL:
        return
    assert last.evictions == 0
    at_first = first.weights_moved_bytes - updated * something_follows(case.recipe, 0)
    for step, report in enumerate(reports):
        # Everything once, then what each optimizer step updated, as soon as something runs after it.
        updates = step + something_follows(case.recipe, step)
        assert report.weights_moved_bytes == at_first + updates * updated
        assert report.gradients_moved_bytes == (step + 1) * gradients * case.recipe.accumulate


@pytest.mark.every_case
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_a_sample_with_every_pair_of_choices_trains_as_plain_pytorch(case: Case) -> None:
    check_equal_to_plain(case, FEW_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("case", PAIRS + REST, ids=str)
def test_every_triple_and_one_choice_at_a_time_train_as_plain_pytorch(case: Case) -> None:
    check_equal_to_plain(case, STEPS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_model_trains_without_the_fault_path(family: str) -> None:
    check_equal_to_plain(Case(family, 25, Recipe()), FEW_STEPS, fault_path=False)
