"""Saved tensors under a host budget: equal bits, bytes within both budgets, and a disk that takes what is too much."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks, SimulatedDevice
from hydra_ext._C.testing import FaultyFiles, FileFault, FileOperation
from hydra_ext.errors import HostBudgetTooSmall, SpillError
from support.benches import assert_same

LAYERS, WIDTH, ROWS = 8, 64, 256
SAVED = 4 * ROWS * WIDTH  # of one layer, for one microbatch
MICROBATCHES, STEPS = 2, 3
WEIGHTS = LAYERS * 4 * WIDTH * (WIDTH + 1)
ALL = 4 * WEIGHTS + 2**16  # with gradients, two moments, and what alignment adds
PAGE = 4096
LEAST = 5 * SAVED + 60 * 1024  # of the device; see tests/stash/test_room.py
TIGHT = ALL + 2 * SAVED  # of the host
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2], ids=["synchronous", "late-1", "late-2"])


@dataclass
class Outcome:
    losses: list[Tensor]
    values: list[Tensor]
    report: hydra_ext.Report | None = None
    planned: int = 0  # what the host holds without saved tensors
    peak: int = 0  # of the arena, seen before and after each layer


class Watched(nn.Tanh):
    """Calls ``note`` where a forward and a backward pass it."""

    note: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if found.requires_grad:
            found.register_hook(lambda _: Watched.note())
        Watched.note()
        return found


def make() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), Watched()) for _ in range(LAYERS)])
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


def step(run: hydra_ext.Run, optimizer: torch.optim.Optimizer, data: list[Tensor], *, rounds: bool) -> list[Tensor]:
    if rounds:
        return list(run.step(data, lambda x: loss_of(run.model, x)).losses)
    return loop(run.model, optimizer, data)


def trained(folder: Path, host_budget: int, *, rounds: bool, seed: int | None = None, **options: Any) -> Outcome:
    model, optimizer, data = make()
    device = SimulatedDevice() if seed is None else SimulatedDevice(asynchronous=True, seed=seed)
    losses: list[Tensor] = []
    mapped: list[int] = []
    with (
        context_of(model, optimizer, folder, host_budget, device=device, **options) as run,
        patch.object(Watched, "note", lambda: mapped.append(run.core.memory.arena_bytes)),
    ):
        for given in steps_of(data):
            losses += step(run, optimizer, given, rounds=rounds)
        assert run._spilling is not None
        report, planned = run.report(), run._spilling.plan.total
    assert not list(folder.iterdir())
    outcome = ended(model, optimizer, losses)
    outcome.report, outcome.planned, outcome.peak = report, planned, max(mapped)
    return outcome


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, int]:
    """The arena's peak if saved tensors stay on the device, in rounds and not."""
    given: dict[str, Any] = {"activations": None, "budget": 4 * LAYERS * SAVED}
    folder = tmp_path_factory.mktemp("spill")
    return {rounds: trained(folder, TIGHT, rounds=rounds, **given).peak for rounds in (False, True)}


@SEEDS
@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
def test_by_default_saved_tensors_go_to_the_disk_when_both_budgets_are_tight(
    seed: int | None, rounds: bool, without: dict[bool, int], tmp_path: Path
) -> None:
    expected = plain()
    found = trained(tmp_path, TIGHT, rounds=rounds, seed=seed)
    assert_same(found.losses, expected.losses)
    assert_same(found.values, expected.values)
    assert found.report is not None
    assert found.report.activations is not None
    assert found.report.peak_bytes <= LEAST
    copies = found.report.activations.copies
    assert copies.disk_written_bytes > STEPS * SAVED
    assert copies.disk_read_bytes > 0
    assert copies.disk_bytes == found.report.activations.host_bytes == found.report.activations.stayed == 0
    assert 0 < copies.peak_host_bytes <= TIGHT - found.planned
    assert without[rounds] < found.peak <= without[rounds] + TIGHT - found.planned


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
    found = trained(tmp_path, TIGHT, rounds=True, **given)
    assert_same(found.losses + found.values, expected.losses + expected.values)
    assert found.report is not None
    assert found.report.activations is not None
    assert found.report.activations.copies.disk_written_bytes > 0


def test_the_planner_counts_the_disk_with_the_speed_that_was_measured(tmp_path: Path) -> None:
    model, optimizer, data = make()
    with context_of(model, optimizer, tmp_path, TIGHT, budget=2 * LEAST) as run:
        for given in steps_of(data):
            step(run, optimizer, given, rounds=True)
        plan = run.plan()
        assert plan is not None
        assert run.fit is not None
        assert run.fit.applied is not None
        assert run._spilling is not None
        homes, planned = run.fit.applied.problem.homes, run._spilling.plan.total
    assert (homes.nbytes, homes.host_budget, plan.host_bytes) == (planned, TIGHT, TIGHT)
    assert plan.disk_bytes > 0
    assert homes.disk > 0
    assert min(plan.lanes["to host"], plan.lanes["to device"]) > plan.disk_bytes / homes.disk


def least_host_budget(folder: Path) -> int:
    model, optimizer, _ = make()
    with pytest.raises(HostBudgetTooSmall) as error, context_of(model, optimizer, folder, 1):
        pass
    return error.value.needed


@pytest.mark.cases(1)
@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
def test_every_host_budget_is_enough_that_leaves_saved_tensors_a_few_pages(rounds: bool, tmp_path: Path) -> None:
    expected, least = plain(), least_host_budget(tmp_path)
    for extra in (0, 3 * PAGE + 1):
        budget = least + _C.STASH_LEAST_BYTES + extra
        found = trained(tmp_path, budget, rounds=rounds)
        assert_same(found.losses + found.values, expected.losses + expected.values)
        assert found.report is not None
        assert found.report.activations is not None
        assert found.report.activations.stayed == 0
        assert found.report.activations.copies.disk_written_bytes > 0
        assert found.report.activations.copies.peak_host_bytes <= budget - found.planned


@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
def test_with_less_all_saved_tensors_stay_on_the_device_or_the_error_says_what_is_missing(
    rounds: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, budget = plain(), least_host_budget(tmp_path) + _C.STASH_LEAST_BYTES - 1
    with caplog.at_level(logging.WARNING):
        found = trained(tmp_path, budget, rounds=rounds, budget=4 * LAYERS * SAVED)
    assert f"give {budget + 1} bytes or more" in caplog.text
    assert_same(found.losses + found.values, expected.losses + expected.values)
    assert found.report is not None
    assert found.report.activations is not None
    assert found.report.activations.copies.disk_written_bytes == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"host_budget= leaves .* raise it by 1 bytes?\."):
        trained(tmp_path, budget, rounds=rounds)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("operation", [FileOperation.READ, FileOperation.ALLOCATE])
def test_a_step_that_the_disk_has_failed_can_be_repeated(operation: FileOperation, tmp_path: Path) -> None:
    expected = plain()
    model, optimizer, data = make()
    files = FaultyFiles()
    losses: list[Tensor] = []
    checks = Checks(poison_hosts=True, spill_files=files)
    with context_of(model, optimizer, tmp_path, TIGHT, checks=checks) as run:
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


@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
def test_wherever_a_full_disk_stops_a_step_it_can_be_repeated(rounds: bool, tmp_path: Path) -> None:
    expected = plain()
    model, optimizer, data = make()
    files = FaultyFiles()
    losses: list[Tensor] = []
    stops: list[str] = []
    checks = Checks(poison_hosts=True, spill_files=files)
    with context_of(model, optimizer, tmp_path, TIGHT, checks=checks) as run:
        for given in steps_of(data):
            while True:
                # The room that an attempt has taken remains, so each one comes further.
                files.fail(FileOperation.ALLOCATE, FileFault.ERROR, 2 if stops else 1, error=errno.ENOSPC)
                try:
                    losses += step(run, optimizer, given, rounds=rounds)
                    break
                except SpillError as error:
                    stops.append(str(error))
                    optimizer.zero_grad()
        written = run.report().activations
        assert written is not None
        assert written.copies.disk_written_bytes > STEPS * SAVED
    assert len(stops) > 3
    assert all("no room for" in stop and "give a larger host_budget=" in stop for stop in stops)
    found = ended(model, optimizer, losses)
    assert_same(found.losses + found.values, expected.losses + expected.values)


@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
def test_where_no_write_succeeds_the_error_names_the_disk(rounds: bool, tmp_path: Path) -> None:
    expected = plain()
    model, optimizer, data = make()
    files = FaultyFiles()
    losses: list[Tensor] = []
    checks = Checks(poison_hosts=True, spill_files=files)
    with context_of(model, optimizer, tmp_path, TIGHT, checks=checks) as run:
        for number, given in enumerate(steps_of(data)):
            if number < 2:
                files.fail(FileOperation.WRITE, FileFault.ERROR, 1, persistent=True, error=errno.ENOSPC)
                with pytest.raises(torch.OutOfMemoryError, match=r"writing .* in spill_dir .* failed: No space left"):
                    step(run, optimizer, given, rounds=rounds)
                files.reset()
                optimizer.zero_grad()
            losses += step(run, optimizer, given, rounds=rounds)
    found = ended(model, optimizer, losses)
    assert_same(found.losses + found.values, expected.losses + expected.values)
