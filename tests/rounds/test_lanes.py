"""Rounds on a device whose compute and transfers finish late, or fail."""

from __future__ import annotations

import pytest
import torch

import hydra_ext
from hydra_ext import _C, Checks, SimulatedDevice, errors
from support.models.zoo import FAMILIES
from support.models.zoo_more import MORE_FAMILIES
from support.rounds.rounds import (
    Plan,
    activations_of_rounds,
    assert_nothing_left,
    build_optimizer,
    differences,
    peak_of_loop,
    train_loop,
    train_rounds,
)
from support.training import parameter_bytes

Operation = _C.testing.Operation
EVERY_FAMILY = {**FAMILIES, **MORE_FAMILIES}
PLAN = Plan(m=3, clip=True)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "experts", "bert"])
def test_no_wait_is_missing(name: str, recompute: bool) -> None:
    family = EVERY_FAMILY[name]
    batches = family.batches(1, 5 * PLAN.m)
    expected = train_loop(family.make(0), family.loss, batches, PLAN)
    model = family.make(0)
    optimizer = build_optimizer(model, PLAN)
    choices = {"round_size": 3, "recompute": recompute}
    budget = activations_of_rounds(family, PLAN, batches, **choices) + parameter_bytes(model) // 3
    device = SimulatedDevice(asynchronous=True, seed=1)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=budget, device=device, checks=checks) as run:
        seen = train_rounds(run, model, family.loss, batches, PLAN, **choices)
        report = run.report()
        backend = run.core.memory.backend
        assert isinstance(backend, _C.SimulatedDevice)
        assert (backend.hazards(), backend.first_hazard()) == (0, "")
    assert differences(seen, expected) == []
    assert report.windows > 0
    assert (report.refusals, report.fallbacks) == (0, 0)
    assert report.evictions > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("operation", [Operation.TO_DEVICE, Operation.TO_HOST, Operation.SLOT], ids=lambda o: o.name)
def test_after_a_transfer_that_failed_the_step_can_be_repeated(operation: _C.testing.Operation) -> None:
    family = EVERY_FAMILY["gpt2"]
    batches = family.batches(1, 2 * PLAN.m)
    expected = train_loop(family.make(0), family.loss, batches, PLAN, steps=2)
    model = family.make(0)
    optimizer = build_optimizer(model, PLAN)
    faults = _C.testing.FaultScript()
    budget = PLAN.m * peak_of_loop(family, PLAN) + parameter_bytes(model) // 2
    failed = 0
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(
        model, optimizer, budget=budget, device=SimulatedDevice(faults=faults), checks=checks, activations=None
    ) as run:
        for nth in (1, 2, 5, 13, 29, 41):
            faults.reset()
            faults.fail(operation, nth)
            try:
                run.step(batches[:3], lambda b: family.loss(model, b), round_size=3, recompute=False)
            except (errors.TransferError, torch.OutOfMemoryError):
                failed += 1
            else:
                break  # there were not so many: the step has been made
            assert_nothing_left(run)
            model.zero_grad()
        faults.reset()
        assert failed > 0
        model.load_state_dict(family.make(0).state_dict())
        optimizer.state.clear()
        seen = train_rounds(run, model, family.loss, batches, PLAN, steps=2, round_size=3, recompute=False)
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
    assert differences(seen, expected) == []
