"""Saved tensors under a host budget: equal bits, bytes within both budgets, and a disk that takes what is too much."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from hydra_ext._C.testing import FaultyFiles, FileFault, FileOperation
from hydra_ext.errors import SpillError
from support.benches import assert_same

LAYERS, WIDTH, ROWS = 8, 64, 256
SAVED = 4 * ROWS * WIDTH  # of one layer, for one microbatch
MICROBATCHES, STEPS = 2, 3
WEIGHTS = LAYERS * 4 * WIDTH * (WIDTH + 1)
ALL = 4 * WEIGHTS + 2**16  # with gradients, two moments, and what alignment adds
LEAST = 5 * SAVED + 60 * 1024  # of the device; see tests/stash/test_room.py
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2], ids=["synchronous", "late-1", "late-2"])


@dataclass
class Outcome:
    losses: list[Tensor]
    values: list[Tensor]
    report: hydra_ext.Report | None = None
    planned: int = 0  # what the host holds without saved tensors


def make() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    data = list(torch.randn(STEPS * MICROBATCHES, ROWS, WIDTH))
    return model, hydra_ext.optim.AdamW(model.parameters(), lr=1e-2), data


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> list[Tensor]:
    losses = []
    for x in data:
        loss = loss_of(model, x)
        (loss / len(data)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def steps_of(data: list[Tensor]) -> list[list[Tensor]]:
    return [data[first : first + MICROBATCHES] for first in range(0, len(data), MICROBATCHES)]


def ended(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Outcome:
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return Outcome([each.cpu() for each in losses], [*(each.detach() for each in model.parameters()), *state])


def plain() -> Outcome:
    model, optimizer, data = make()
    losses = [loss for given in steps_of(data) for loss in loop(model, optimizer, given)]
    return ended(model, optimizer, losses)


def context_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, host_budget: int, **options: Any
) -> hydra_ext.offload:
    given = {"budget": LEAST, "device": SimulatedDevice(), "checks": Checks(poison_hosts=True), **options}
    return hydra_ext.offload(model, optimizer, host_budget=host_budget, spill_dir=folder, **given)


def trained(folder: Path, host_budget: int, *, rounds: bool, seed: int | None = None, **options: Any) -> Outcome:
    model, optimizer, data = make()
    device = SimulatedDevice() if seed is None else SimulatedDevice(asynchronous=True, seed=seed)
    losses: list[Tensor] = []
    with context_of(model, optimizer, folder, host_budget, device=device, **options) as run:
        for given in steps_of(data):
            if rounds:
                losses += run.step(given, lambda x: loss_of(model, x)).losses
            else:
                losses += loop(model, optimizer, given)
        assert run._spilling is not None
        report, planned = run.report(), run._spilling.plan.total
    assert not list(folder.iterdir())
    outcome = ended(model, optimizer, losses)
    outcome.report, outcome.planned = report, planned
    return outcome


@SEEDS
@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
def test_by_default_saved_tensors_go_to_the_disk_when_both_budgets_are_tight(
    seed: int | None, rounds: bool, tmp_path: Path
) -> None:
    expected = plain()
    found = trained(tmp_path, ALL + 2 * SAVED, rounds=rounds, seed=seed)
    assert_same(found.losses, expected.losses)
    assert_same(found.values, expected.values)
    assert found.report is not None
    assert found.report.activations is not None
    assert found.report.peak_bytes <= LEAST
    copies = found.report.activations.copies
    assert copies.disk_written_bytes > STEPS * SAVED
    assert copies.disk_read_bytes > 0
    assert copies.disk_bytes == copies.host_bytes == found.report.activations.stayed == 0
    assert 0 < copies.peak_host_bytes <= ALL + 2 * SAVED - found.planned


@pytest.mark.parametrize("extra", [-WEIGHTS, 64 * SAVED])
def test_state_goes_first_and_with_room_on_the_host_no_saved_tensor_does(extra: int, tmp_path: Path) -> None:
    expected = plain()
    found = trained(tmp_path, ALL + extra, rounds=False)
    assert_same(found.losses + found.values, expected.losses + expected.values)
    assert found.report is not None
    assert found.report.activations is not None
    written = found.report.activations.copies.disk_written_bytes
    assert (found.report.disk_written_bytes > 0, written > 0) == (extra < 0, extra < 0)


def test_a_policy_of_the_user_is_within_the_host_budget_too(tmp_path: Path) -> None:
    expected = plain()
    given: dict[str, Any] = {"activations": hydra_ext.Offload(), "budget": 2 * LEAST}
    found = trained(tmp_path, ALL + 2 * SAVED, rounds=True, **given)
    assert_same(found.losses + found.values, expected.losses + expected.values)
    assert found.report is not None
    assert found.report.activations is not None
    assert found.report.activations.copies.disk_written_bytes > 0


@pytest.mark.parametrize("operation", [FileOperation.READ, FileOperation.ALLOCATE])
def test_a_step_that_the_disk_has_failed_can_be_repeated(operation: FileOperation, tmp_path: Path) -> None:
    expected = plain()
    model, optimizer, data = make()
    files = FaultyFiles()
    losses: list[Tensor] = []
    checks = Checks(poison_hosts=True, spill_files=files)
    with context_of(model, optimizer, tmp_path, ALL + 2 * SAVED, checks=checks) as run:
        for number, given in enumerate(steps_of(data)):
            if number == (1 if operation == FileOperation.READ else 0):
                files.fail(operation, FileFault.ERROR, 3, error=errno.EIO)
                with pytest.raises(SpillError, match="spill_dir"):
                    run.step(given, lambda x: loss_of(model, x))
                assert files.met() == 1
                files.reset()
                optimizer.zero_grad()
            losses += run.step(given, lambda x: loss_of(model, x)).losses
    found = ended(model, optimizer, losses)
    assert_same(found.losses + found.values, expected.losses + expected.values)
