"""What cannot run as a round, or not be recomputed, is noticed, done another way, and equal all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Checks
from hydra_ext.runtime.rounds.choice import Choice, Decision
from support.models.zoo import FAMILIES, Family
from support.models.zoo_more import MORE_FAMILIES, Mlp, Residual
from support.rounds.rounds import (
    Plan,
    Seen,
    assert_nothing_left,
    build_optimizer,
    differences,
    peak_of_loop,
    train_loop,
    train_rounds,
)
from support.training import parameter_bytes

PLAN = Plan(m=3)
ROOMY = 2**23


def family_of(build: type[nn.Module]) -> Family:
    return Family(build.__name__, build, MORE_FAMILIES["residual"].batch)


def both(
    family: Family, *, activations: Literal["auto"] | None = None, **choices: Any
) -> tuple[Seen, Seen, hydra_ext.Report]:
    batches = family.batches(1, 5 * PLAN.m)
    expected = train_loop(family.make(0), family.loss, batches, PLAN)
    model = family.make(0)
    optimizer = build_optimizer(model, PLAN)
    layers, checks = list(model.layers), Checks(poison_hosts=True)
    with hydra_ext.offload(
        model, optimizer, budget=ROOMY, blocks=layers, checks=checks, activations=activations
    ) as run:
        seen = train_rounds(run, model, family.loss, batches, PLAN, **choices)
        assert_nothing_left(run)
        assert run.report().windows > 0
        return seen, expected, run.report()


# ---- one at a time --------------------------------------------------------------------------------------------------


class Sharing(Residual):
    """Every third batch makes a value that the next two use as well: one graph for three."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.calls = 0
        self.statistics = nn.BatchNorm1d(9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        kept = self.scales.sum() + 1 if self.kept is None or self.calls % 3 == 0 else self.kept
        self.kept = kept
        self.calls += 1
        noise = functional.dropout(torch.ones(2, 9, 4), 0.5)
        return super().forward(input_ids, labels) + kept + self.statistics(noise).sum() * 0


class Counting(Residual):
    """Its layers take turns counting on one number, which each call goes on from."""

    count = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            self.count = self.count + 1
            x = x + layer(x) / self.count
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("build", "reason", "rounds"), [(Sharing, "share|outside", 0), (Counting, "Counting.count is set by", 5 * PLAN.m)]
)
def test_what_microbatches_share_makes_them_run_one_at_a_time_with_one_notice(
    build: type[nn.Module], reason: str, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hydra_ext"):
        seen, expected, report = both(family_of(build), round_size=3, recompute=False)
    assert differences(seen, expected) == []
    assert (report.rounds, report.refusals, report.fallbacks) == (rounds, 1, 5 * PLAN.m)
    notices = [record.getMessage() for record in caplog.records if "one microbatch at a time" in record.getMessage()]
    assert len(notices) == 1
    assert any(word in notices[0] for word in reason.split("|"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("choices", [{}, {"round_size": 1}, {"round_size": 2}], ids=str)
def test_what_a_microbatch_has_from_an_earlier_round_makes_all_of_the_step_a_loop(choices: dict[str, Any]) -> None:
    seen, expected, report = both(family_of(Sharing), recompute=False, **choices)
    assert differences(seen, expected) == []
    assert (report.refusals, report.fallbacks, report.retries) == (1, 5 * PLAN.m, 0)


@pytest.mark.parametrize("build", [Sharing, Counting])
def test_by_default_what_microbatches_share_is_as_in_a_loop(build: type[nn.Module]) -> None:
    """Whether they are refused depends on the rounds, which depend on what was measured."""
    seen, expected, report = both(family_of(build), activations="auto")
    assert differences(seen, expected) == []
    assert (report.refusals <= 1, report.retries) == (True, 0)


# ---- recomputation --------------------------------------------------------------------------------------------------


class Remembering(Mlp):
    """Reads, where no look at the layer leads, what the layer before it left there."""

    bag: Callable[[], dict[str, Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        left = self.bag().get("left")
        y = super().forward(x if left is None else x + 0.1 * left)
        self.bag()["left"] = y
        return y


class SideChannel(Residual):
    def __init__(self) -> None:
        super().__init__(layer=Remembering)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        bag: dict[str, Tensor] = {}
        x = self.embed(input_ids)
        for layer in self.layers:
            layer.bag = lambda: bag
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ReadsTheNext(Residual):
    """Its layers read what a later one changes: calling one again at once would show nothing."""

    def __init__(self) -> None:
        super().__init__(layer=Scaled)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        bag = {"factor": 1.0}
        x = self.embed(input_ids)
        for layer in self.layers:
            layer.bag = lambda: bag
            x = x + layer(x)
            bag["factor"] *= 0.5
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Scaled(Mlp):
    bag: Callable[[], dict[str, float]]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bag()["factor"]


@pytest.mark.parametrize("build", [SideChannel, ReadsTheNext])
def test_a_block_that_gives_something_else_when_called_again_is_kept(
    build: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hydra_ext"):
        seen, expected, report = both(family_of(build), round_size=3, recompute=True)
    assert differences(seen, expected) == []
    assert (report.rounds, report.refusals, report.fallbacks) == (5, 0, 0)
    assert [record.getMessage() for record in caplog.records if "keeps the activations" in record.getMessage()]


# ---- what the budget has room for -----------------------------------------------------------------------------------


def test_recomputing_and_smaller_rounds_are_chosen_where_the_budget_asks_for_it() -> None:
    choice = Choice(budget=1000, largest_block=50)
    assert choice.next(8, size=None, recompute=None) == Decision(1, False)
    choice.learn(Decision(1, False), held=200, peak=300)
    assert choice.next(4, size=None, recompute=None) == Decision(4, False)
    assert choice.next(8, size=None, recompute=False) == Decision(4, False)
    assert choice.next(8, size=None, recompute=None) == Decision(1, True)
    choice.learn(Decision(1, True), held=50, peak=200)
    assert choice.next(8, size=None, recompute=None) == Decision(8, True)
    assert choice.next(80, size=None, recompute=None) == Decision(15, True)
    assert choice.next(80, size=20, recompute=None) == Decision(20, True)
    assert choice.next(80, size=80, recompute=False) == Decision(80, False)


@pytest.mark.full
@pytest.mark.parametrize(("name", "chosen"), [("tied_llama", None), ("bert", None), ("tied_llama", "auto")])
def test_steps_keep_to_a_budget_that_has_no_room_for_all_activations(name: str, chosen: Literal["auto"] | None) -> None:
    family = {**FAMILIES, **MORE_FAMILIES}[name]
    plan = Plan(m=8)
    batches = family.batches(1, 5 * plan.m)
    expected = train_loop(family.make(0), family.loss, batches, plan)
    each = peak_of_loop(family, plan)
    for activations in (12 * each, 5 * each, 2 * each):
        model = family.make(0)
        optimizer = build_optimizer(model, plan)
        layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
        budget = activations + parameter_bytes(model) // 2 + 2**17
        with hydra_ext.offload(
            model,
            optimizer,
            budget=budget,
            blocks=list(layers),
            checks=Checks(poison_hosts=True),
            activations=chosen,
        ) as run:
            seen = train_rounds(run, model, family.loss, batches, plan)
            report = run.report()
        assert differences(seen, expected) == []
        assert report.peak_bytes <= budget
        assert (report.refusals, report.fallbacks) == (0, 0)
        if activations == 12 * each and chosen is None:
            assert report.rounds == 5 + 1  # the first step tries one microbatch


def test_recomputed_layers_hold_less() -> None:
    family = MORE_FAMILIES["tied_llama"]
    peaks = []
    for recompute in (False, True):
        model = family.make(0)
        optimizer = build_optimizer(model, PLAN)
        blocks = list(model.model.layers)
        with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=blocks, checks=Checks(poison_hosts=True)) as run:
            train_rounds(run, model, family.loss, family.batches(1, 15), PLAN, round_size=3, recompute=recompute)
            report = run.report()
            assert report.windows > 0
        peaks.append(report.peak_activations_bytes + report.peak_workspace_bytes)
    assert peaks[1] < peaks[0] / 1.5
