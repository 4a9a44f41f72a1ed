"""`hydra_ext.plan.fit`: a plan for a training step, from a dry run."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ext
from hydra_ext.errors import (
    BudgetTooSmall,
    HostBudgetTooSmall,
    InvalidArgument,
    InvalidBudget,
    PlanError,
)
from hydra_ext.plan import CARDS, Card, Plan, fit
from support.models.zoo import FAMILIES

pytestmark = pytest.mark.every_case

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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


def test_memory_over_the_step_has_the_peak() -> None:
    model = layered()
    for budget in (None, int(1.3 * planned(model).least_bytes)):
        plan = planned(model, budget=budget)
        assert max(point.total for point in plan.memory) == plan.peak_bytes
        names = [point.segment for point in plan.memory]
        assert names == names[::-1]
        assert {segment.name for segment in plan.segments} < set(names)


def homes_of(model: nn.Module, state: int) -> int:
    return sum(p.nbytes + (p.nbytes + state * p.numel()) * p.requires_grad for p in model.parameters())


@pytest.mark.full
def test_the_host_holds_weights_gradients_state_and_activations_that_left() -> None:
    model = layered()
    model[0].requires_grad_(False)
    without = planned(model, device=None, link=1e6)
    assert (without.host_bytes, without.disk_bytes) == (homes_of(model, 0), 0)
    optimizer = hydra_ext.optim.AdamW(model.parameters())
    assert planned(model, device=None, link=1e6, optimizer=optimizer).host_bytes == homes_of(model, 8)
    assert planned(model, device=None, link=1e6, optimizer=8).host_bytes == homes_of(model, 8)
    lean = planned(model, budget=int(1.3 * without.least_bytes), recompute=False)
    moved = lean.round_size * sum(segment.moved_bytes for segment in lean.segments)
    assert lean.host_bytes >= homes_of(model, 0) + moved > homes_of(model, 0)


def test_what_exceeds_the_hosts_budget_is_on_the_disk() -> None:
    model = layered()
    least = planned(model).least_bytes
    options: dict[str, Any] = {"budget": 2 * least, "link": 1e12, "optimizer": 8, "recompute": False}
    free = planned(model, **options)
    homes = homes_of(model, 8)
    assert free.host_bytes > homes
    assert planned(model, **options, host_budget=free.host_bytes).disk_bytes == 0
    for limit in (free.host_bytes - homes, homes - 1):
        plan = planned(model, **options, host_budget=limit)
        assert plan.host_bytes <= limit
        assert plan.host_bytes + plan.disk_bytes >= homes


@pytest.mark.full
def test_a_host_that_cannot_hold_what_has_to_leave() -> None:
    model = layered()
    options: dict[str, Any] = {"budget": planned(model).least_bytes, "recompute": False}
    with pytest.raises(HostBudgetTooSmall, match="no activation leaves") as caught:
        planned(model, **options, host_budget=1)
    needed = caught.value.needed
    plan = planned(model, **options, host_budget=needed)
    assert plan.host_bytes == needed
    assert plan.disk_bytes > 0
    with pytest.raises(HostBudgetTooSmall):
        planned(model, **options, host_budget=int(0.9 * needed))
    fast, slow = (planned(model, **options, host_budget=int(0.9 * needed), disk=disk) for disk in (1e12, "1MB"))
    assert fast.seconds < slow.seconds
    assert fast.host_bytes == int(0.9 * needed)
    assert fast.disk_bytes > 0


@pytest.mark.parametrize("name", ["VGG", "GPT-2"])
def test_what_stays_is_what_plain_pytorch_saves(name: str) -> None:
    """A storage that a layer and the next one save is there once."""
    if name == "VGG":
        layers = [[nn.Conv2d(a, b, 3, padding=1), nn.ReLU()] for a, b in ((3, 8), (8, 8), (8, 16), (16, 16))]
        model: nn.Module = nn.Sequential(*itertools.chain(*layers))
        batch: Any = torch.randn(2, 3, 16, 16)
        loss = lambda x: model(x).sum()  # noqa: E731
    else:
        family = FAMILIES["gpt2"]
        model, batch = family.make(0), family.batches(1, 1)[0]
        loss = lambda mb: family.loss(model, mb)  # noqa: E731
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        graph = loss(batch)
    plan = fit(model, batch, loss, device=SLOW, microbatches=1, recompute=False)
    assert {segment.choice for segment in plan.segments if segment.saved_bytes} == {"keep"}
    assert max(point.kept for point in plan.memory) == pytest.approx(sum(saved.values()), rel=0.02)
    assert graph.requires_grad


@pytest.mark.parametrize(("optimizer", "state"), [(0.0, 0), (8.0, 8), ("AdamW", 8)])
def test_an_update_takes_the_time_of_the_hosts_memory(optimizer: Any, state: int) -> None:
    model = layered()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    given = hydra_ext.optim.AdamW(model.parameters()) if optimizer == "AdamW" else optimizer
    card = dataclasses.replace(SLOW, host_bytes_per_second=1e6)
    plan = planned(model, device=card, optimizer=given)
    moved = numbers * (4 + 2 * (4 + state))  # reads gradients, reads and writes weights and state
    assert plan.lanes["optimizer"] == pytest.approx(moved / 1e6)
    assert plan.binding == "optimizer"
    hidden = plan.seconds - planned(model, device=card, optimizer=given, update_seconds=0.0).seconds
    assert 0.5 * plan.lanes["optimizer"] < hidden < plan.lanes["optimizer"]
    assert planned(model, device=card, optimizer=given, update_seconds=3.0).lanes["optimizer"] == 3.0
    assert 0 < planned(model, device=None, budget=plan.budget).lanes["optimizer"] < 1  # measured here


def test_nothing_is_updated_where_nothing_is_trained() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    plan = planned(nn.Sequential(frozen, nn.Linear(WIDTH, 1)))
    assert plan.lanes["optimizer"] == pytest.approx(3 * 4 * (WIDTH + 1) / SLOW.host_bytes_per_second)


def test_a_model_that_is_not_trained_has_no_step_to_plan() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    head = nn.Linear(WIDTH, 1)
    with pytest.raises(InvalidArgument, match="no parameter that requires a gradient"):
        fit(frozen, torch.zeros(2, WIDTH), lambda x: head(frozen(x)).sum())


def test_larger_rounds_hide_an_update_that_takes_long() -> None:
    """The next step's first round reads all weights, so only its forward hides the update."""
    model = layered()
    options = {"microbatches": 8, "budget": "64MiB", "link": 1e12}
    alone, together = (planned(model, **options, update_seconds=seconds) for seconds in (0.0, 1.0))
    assert together.round_size == 8
    assert planned(model, **options, update_seconds=1.0, round_size=1).seconds > together.seconds
    assert alone.seconds < together.seconds


def test_what_stays_where_there_is_room_is_held() -> None:
    model = layered()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    needs = planned(model, optimizer=8.0).peak_bytes
    for budget in (needs, needs + weights // 2, needs + 2 * weights, needs + 4 * weights, needs + 8 * weights):
        plan = planned(model, optimizer=8.0, budget=budget)
        assert plan.peak_bytes <= plan.held_bytes <= budget
        assert plan.held_bytes >= min(budget, plan.peak_bytes + weights) - weights // 4
    assert plan.held_bytes == pytest.approx(plan.peak_bytes + 4 * weights, rel=0.1)  # with gradients and state
    assert planned(model, budget=budget).held_bytes == pytest.approx(plan.peak_bytes + weights, rel=0.1)


@pytest.mark.full
def test_a_given_round_size_is_kept() -> None:
    model = layered()
    alone, together = (planned(model, round_size=size) for size in (1, 4))
    assert (alone.round_size, together.round_size) == (1, 4)
    assert alone.least_bytes < together.least_bytes
    with pytest.raises(BudgetTooSmall) as caught:
        planned(model, round_size=4, budget=together.least_bytes - 1)
    assert "the round's other microbatches" in caught.value.terms
    assert sum(caught.value.terms.values()) == caught.value.needed == together.least_bytes
    assert planned(model, round_size=4, budget=together.least_bytes).round_size == 4


def test_an_operation_that_exceeds_the_budget() -> None:
    model = nn.Linear(WIDTH, CLASSES)
    with pytest.raises(BudgetTooSmall) as caught:
        planned(model, budget=4 * ROWS * CLASSES)
    assert caught.value.terms["activations"] >= 4 * ROWS * CLASSES


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "abacus"}, InvalidArgument, "rtx4090-24"),
        ({"link": 0}, InvalidArgument, "nothing could move"),
        ({"link": float("nan")}, InvalidArgument, "nothing could move"),
        ({"link": "0GB"}, InvalidBudget, "link"),
        ({"disk": 0}, InvalidArgument, "disk=0: nothing could move"),
        ({"disk": float("nan")}, InvalidArgument, "disk=nan"),
        ({"disk": "0GB"}, InvalidBudget, "disk"),
        ({"microbatches": 0}, InvalidArgument, "at least one"),
        ({"microbatches": 5000}, PlanError, "1 to 1023 microbatches"),
        ({"round_size": 5}, InvalidArgument, "round_size=5 contradicts microbatches=4"),
        ({"round_size": 0}, InvalidArgument, "round_size=0 contradicts"),
        ({"host_budget": "0GB"}, InvalidBudget, "host_budget"),
        ({"optimizer": -1}, InvalidArgument, "optimizer=-1"),
        ({"optimizer": float("nan")}, InvalidArgument, "optimizer=nan"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, InvalidArgument, "optimizer=SGD: the size of its state"),
        ({"budget": "much"}, InvalidBudget, "budget"),
        ({"budget": -1}, InvalidBudget, "positive"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        planned(layered(1), **options)


def test_it_is_a_verb_of_the_module() -> None:
    assert hydra_ext.plan.fit is fit
    assert hydra_ext.plan.Plan is Plan
    with pytest.raises(AttributeError, match="no attribute 'fi'"):
        hydra_ext.plan.fi  # noqa: B018
