"""Random programs step in rounds as in the loop, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from support.rounds.programs import Call, Program, batches, build, programs
from support.rounds.rounds import Plan, differences, train_loop, train_rounds

FEATURES = ("tied weights", "divergent paths", "in-place operations", "checkpoints", "nested outputs")


def loss(model: nn.Module, batch: tuple[Tensor, tuple[Call, ...]]) -> Tensor:
    value: Tensor = model(*batch)
    return value


def check(program: Program) -> None:
    data = batches(program)
    plan = Plan(m=len(data), optimizer="sgd")
    expected = train_loop(build(program), loss, data, plan, steps=1)
    model = build(program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Every checkpoint keeps a random state of five thousand bytes, more than all the weights together.
    budget = 2**20 if program.roomy else 2**16 + 2 * 6 * 2**10 * program.checkpoints()
    with hydra_ext.offload(
        model, optimizer, budget=budget, blocks=list(model.blocks), checks=Checks(poison_hosts=True)
    ) as run:
        choices = {"round_size": program.round_size, "recompute": program.recompute}
        seen = train_rounds(run, model, loss, data, plan, steps=1, **choices)
        report = run.report()
    assert differences(seen, expected) == []
    assert report.windows > 0
    if program.accumulates_out_of_order():
        assert report.rounds * program.round_size + report.fallbacks >= len(data)
    else:
        assert (report.refusals, report.fallbacks) == (0, 0)
        assert report.rounds == -(-len(data) // program.round_size)


@pytest.mark.parametrize("examples", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_random_programs_step_as_the_loop_does(examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(programs())
    def all_of_them(program: Program) -> None:
        seen.update(["examples", *program.features()])
        check(program)

    all_of_them()
    shares = {feature: seen[feature] / seen["examples"] for feature in FEATURES}
    assert seen["examples"] >= examples
    assert min(shares.values()) >= 0.1, shares
