"""`hydra_ext.plan.fit`: a plan for a training step, from a dry run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ext
from hydra_ext.errors import BudgetTooSmall, InvalidArgument, InvalidBudget, NotOnFakeTensors
from hydra_ext.plan import CARDS, Card, Plan, fit
from support.models.zoo import FAMILIES

ROWS, WIDTH, CLASSES = 256, 64, 4096
KINDS = ("keep", "offload", "recompute", "recompute, inputs offloaded")
SLOW = Card(
    name="slow",
    memory_bytes=2**30,
    half_flops=1e9,
    full_flops=1e9,
    memory_bytes_per_second=1e9,
    link_bytes_per_second=1e8,
)


def layered(depth: int = 6) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(depth))
    )


def planned(model: nn.Module, **options: Any) -> Plan:
    return fit(model, torch.randn(ROWS, WIDTH), lambda x: model(x).square().mean(), **{"device": SLOW, **options})


def test_more_budget_is_never_slower_and_keeps_more() -> None:
    model = layered()
    roomy = planned(model)
    budgets = [roomy.least_bytes * (roomy.ideal_bytes / roomy.least_bytes) ** (i / 5) for i in range(6)]
    plans = [planned(model, budget=int(budget) + 1) for budget in budgets]
    for plan in plans:
        assert plan.least_bytes <= plan.peak_bytes + 1
        assert plan.peak_bytes <= plan.budget
        assert {segment.choice for segment in plan.segments} <= set(KINDS)
        assert plan.binding in plan.lanes
        assert all(b >= a for (a, _), (b, _) in itertools.pairwise(plan.curve))
        assert all(b <= a for (_, a), (_, b) in itertools.pairwise(plan.curve))
    seconds = [plan.seconds for plan in plans]
    assert all(later <= 1.02 * earlier for earlier, later in itertools.pairwise(seconds))
    assert {segment.choice for segment in plans[-1].segments if segment.saved_bytes} == {"keep"}
    assert sum(segment.moved_bytes for segment in plans[0].segments) > 0


def test_a_card_gives_budget_speed_and_link() -> None:
    family = FAMILIES["gpt2"]
    model, batch = family.make(0), family.batches(1, 1)[0]
    plans = {name: fit(model, batch, lambda mb: family.loss(model, mb), device=name) for name in ("t4-16", "h100-80")}
    for name, plan in plans.items():
        assert 0.9 * CARDS[name].memory_bytes < plan.budget < CARDS[name].memory_bytes
    assert plans["h100-80"].lanes["compute"] < plans["t4-16"].lanes["compute"]
    assert plans["h100-80"].lanes["to device"] < plans["t4-16"].lanes["to device"]


def test_without_card_and_budget_everything_stays() -> None:
    plan = planned(layered(), device=None, link=1e6)
    assert plan.budget == plan.ideal_bytes
    assert not any(segment.moved_bytes for segment in plan.segments)


def test_a_loss_outside_of_the_model_counts() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    tokens = torch.randint(0, CLASSES, (ROWS,))

    def fn(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), tokens)

    logits = 4 * ROWS * CLASSES
    plan = fit(model, torch.randn(ROWS, WIDTH), fn, device=SLOW)
    assert plan.least_bytes >= 2 * logits


def test_a_slow_link_binds_and_advice_says_so() -> None:
    model = layered()
    budget = int(1.3 * planned(model).least_bytes)
    plan = planned(model, budget=budget, link=1e6)
    assert plan.binding in ("to device", "to host")
    assert "link" in plan.advice[0].change
    assert plan.advice[0].seconds < plan.seconds
    assert planned(model, budget=budget, link="100GB").seconds < plan.seconds


def test_the_table_names_what_matters() -> None:
    text = str(planned(layered(12)))
    for word in ("least", "ideal", "rounds of", "binds", "what would help", "choice", "MiB", "*"):
        assert word in text
    assert len(text.splitlines()) < 40  # alike layers share a row


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    model = layered()
    plan = planned(model)
    with pytest.raises(BudgetTooSmall, match=r"give at least \d+ bytes") as caught:
        planned(model, budget=plan.least_bytes - 1)
    error = caught.value
    assert error.needed == error.smallest_budget == plan.least_bytes
    assert error.ideal == plan.ideal_bytes
    assert sum(error.terms.values()) == error.needed
    assert error.moment is not None
    assert error.moment.split(" of ")[0] in ("forward", "backward")
    assert planned(model, budget=error.needed).peak_bytes <= error.needed


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "abacus"}, InvalidArgument, "rtx4090-24"),
        ({"link": 0}, InvalidArgument, "nothing could move"),
        ({"link": float("nan")}, InvalidArgument, "nothing could move"),
        ({"link": "0GB"}, InvalidBudget, "link"),
        ({"microbatches": 0}, InvalidArgument, "at least one"),
        ({"budget": "much"}, InvalidBudget, "budget"),
        ({"budget": -1}, InvalidBudget, "positive"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        planned(layered(1), **options)


def test_a_function_that_reads_numbers() -> None:
    model = layered(1)
    with pytest.raises(NotOnFakeTensors, match="real step"):
        fit(model, torch.randn(ROWS, WIDTH), lambda x: (model(x).sum(), model(x).sum().item()))


def test_it_is_a_verb_of_the_module() -> None:
    assert hydra_ext.plan.fit is fit
    assert hydra_ext.plan.Plan is Plan
    with pytest.raises(AttributeError, match="no attribute 'fi'"):
        hydra_ext.plan.fi  # noqa: B018
