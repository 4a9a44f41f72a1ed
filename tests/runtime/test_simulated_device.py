"""Training on the simulated device's harder modes: late compute, jittered lanes, failing transfers."""

from typing import Literal

import pytest
import torch

from hydra_ext import _C, Checks, Run, SimulatedDevice, errors, offload
from support.models.zoo import FAMILIES, Family
from support.training import Recipe, build, build_optimizer, plain_peak

GPT2 = FAMILIES["gpt2"]
RECIPE = Recipe()
STEPS = 4
Operation = _C.testing.Operation


class Trainee:
    """A model and its optimizer; a step can be repeated as often as it fails."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model = build(family, RECIPE)
        self.optimizer = build_optimizer(self.model, RECIPE)
        self.batches = family.batches(0)[:STEPS]

    def step(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        loss = self.family.loss(self.model, self.batches[index])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def abandon(self) -> None:
        self.optimizer.zero_grad()

    def equals(self, other: "Trainee") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.model.parameters(), other.model.parameters(), strict=True))


@pytest.fixture(scope="module")
def reference() -> tuple[Trainee, list[torch.Tensor]]:
    plain = Trainee(GPT2)
    return plain, [plain.step(index) for index in range(STEPS)]


@pytest.fixture(scope="module")
def budget() -> int:
    weights = sum(parameter.nbytes for parameter in build(GPT2, RECIPE).parameters())
    return plain_peak(GPT2, RECIPE) + weights // 3


def hazards(run: Run) -> tuple[int, str]:
    device = run.core.memory.backend
    assert isinstance(device, _C.SimulatedDevice)
    return device.hazards(), device.first_hazard()


@pytest.mark.parametrize(("seed", "activations"), [(0, None), (1, None), (2, None), (3, "auto")])
def test_compute_that_ends_late_sees_no_slot_overwritten_and_changes_no_bit(
    seed: int, activations: Literal["auto"] | None, reference: tuple[Trainee, list[torch.Tensor]], budget: int
) -> None:
    plain, losses = reference
    subject = Trainee(GPT2)
    device = SimulatedDevice(asynchronous=True, seed=seed)
    checks = Checks(poison_hosts=True)
    with offload(
        subject.model, subject.optimizer, budget=budget, device=device, checks=checks, activations=activations
    ) as run:
        got = [subject.step(index) for index in range(STEPS)]
        assert hazards(run) == (0, "")
        assert run.report().evictions > 0 or activations == "auto"
    assert all(torch.equal(a, b) for a, b in zip(got, losses, strict=True))
    assert subject.equals(plain)


@pytest.mark.cases(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_jittered_lanes_change_no_bit(
    asynchronous: bool, reference: tuple[Trainee, list[torch.Tensor]], budget: int
) -> None:
    plain, losses = reference
    faults = _C.testing.FaultScript()
    faults.jitter(Operation.TO_DEVICE, 0.002, 1)
    faults.jitter(Operation.TO_HOST, 0.002, 2)
    subject = Trainee(GPT2)
    device = SimulatedDevice(asynchronous=asynchronous, faults=faults)
    with offload(
        subject.model, subject.optimizer, budget=budget, device=device, checks=Checks(poison_hosts=True)
    ) as run:
        got = [subject.step(index) for index in range(STEPS)]
        assert hazards(run) == (0, "")
    assert all(torch.equal(a, b) for a, b in zip(got, losses, strict=True))
    assert subject.equals(plain)


@pytest.mark.parametrize("operation", [Operation.TO_DEVICE, Operation.TO_HOST, Operation.SLOT], ids=lambda o: o.name)
def test_whichever_operation_fails_the_step_can_be_repeated(
    operation: _C.testing.Operation, reference: tuple[Trainee, list[torch.Tensor]], budget: int
) -> None:
    plain, losses = reference
    faults = _C.testing.FaultScript()
    subject = Trainee(GPT2)
    failed = 0
    device = SimulatedDevice(faults=faults)
    checks = Checks(poison_hosts=True)
    with offload(
        subject.model, subject.optimizer, budget=budget, device=device, checks=checks, activations=None
    ) as run:
        for index in range(STEPS):
            for nth in (1, 2, 3, 5, 8, 13, 21):
                faults.reset()
                faults.fail(operation, nth)
                try:
                    torch.manual_seed(index)
                    subject.family.loss(subject.model, subject.batches[index]).backward()
                except (errors.TransferError, torch.OutOfMemoryError):
                    failed += 1
                subject.abandon()
                assert run.core.pager.pins == 0
                assert not run.core.gate.open
            faults.reset()
            assert torch.equal(subject.step(index), losses[index])
    assert failed > 0
    assert subject.equals(plain)


def test_a_gradient_that_did_not_arrive_is_not_there() -> None:
    faults = _C.testing.FaultScript()
    layer = torch.nn.Linear(64, 64, bias=False)
    with offload(layer, budget="1MB", device=SimulatedDevice(faults=faults)):
        loss = layer(torch.ones(1, 64)).sum()
        faults.fail(Operation.TO_HOST, 1)
        with pytest.raises(errors.TransferError):
            loss.backward()
        assert layer.weight.grad is None
        layer(torch.ones(1, 64)).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.ones(64, 64))
