"""Fleets whose jobs train adapters of one frozen base and make their steps together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.fleet import Fleet, Guide, Job, Outcome, Results, history
from hydra_ext.fleet.scheduling import packing
from support.fleet import drives, trainings
from support.fleet.adapters import (
    BUDGET,
    DEVICE,
    WIDTH,
    draws,
    job,
    several,
    two,
)
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import driven, events, wait_for


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs with one base go together, whatever was measured."""
    monkeypatch.setattr(packing, "slowdowns", lambda options: [1.0] * len(options))


def together(folder: Path, jobs: Sequence[Job], **options: Any) -> Results:
    fleet = Fleet(folder, devices=[DEVICE], budget=BUDGET)
    return fleet.run([replace(each, exact=False) for each in jobs], techniques=["common base"], **options)


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(two, id="like"),
        pytest.param(several, id="unlike", marks=pytest.mark.full),
    ],
)
def test_jobs_with_one_base_have_the_bits_of_the_plain_loop(jobs: Any, tmp_path: Path) -> None:
    """Trials compare with the bits of offload first."""
    given = jobs()
    results = Fleet(tmp_path, devices=[DEVICE], budget=BUDGET).run(given, techniques=["common base"], interval=0.2)
    assert_as_alone(results, given)
    assert history.load(tmp_path).plans[0].packs == [[each.name for each in given]]
    assert {len(result.stretches) for result in results.values()} == {1}
    assert not list(tmp_path.glob("*/gang-*"))


@pytest.mark.full
@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("what", ["raise", "kill", "hang"])
@pytest.mark.cases(1)
def test_jobs_go_on_after_a_mishap_of_one(what: str, tmp_path: Path) -> None:
    """All go on from their checkpoints: together if it is known who is to blame, else alone."""
    loss = partial(trainings.mishap, what=what, folder=trainings.tokens(tmp_path / "tokens", 1), after=14)
    slow = partial(drives.slowly, seconds=0.02)
    jobs = [job("blamed", loss=loss, steps=9), job("other", loss=slow, steps=20), job("third", loss=slow, steps=20)]
    results = together(tmp_path / "fleet", jobs, interval=1e-3, patience=5.0)
    assert_as_alone(results, [job("blamed", steps=9), *jobs[1:]])
    assert {len(result.stretches) for result in results.values()} == {2}
    again = [each.start for name in ("other", "third") for each in results[name].stretches[1:]]
    assert (again[0] == pytest.approx(again[1], abs=0.1)) == (what == "raise")
    assert "the loss has had a mishap" in str(results["other"].stretches[0].failure) or what != "raise"


class StopsOne(Guide):
    def stops(self, job: str, step: int, loss: float) -> bool:
        return job == "a" and step == 3


@pytest.mark.full
@pytest.mark.usefixtures("gaining")
def test_a_long_evaluation_is_no_hang_of_the_others(tmp_path: Path) -> None:
    slow = partial(drives.slowly, seconds=0.02)
    judge = partial(trainings.slow_judge, seconds=2.0)
    jobs = [job("judged", loss=judge, steps=3), job("other", loss=slow, steps=12)]
    results = together(tmp_path, jobs, patience=3.5)
    assert_as_alone(results, jobs)
    assert all(len(result.stretches) == 1 for result in results.values())


@pytest.mark.full
@pytest.mark.usefixtures("gaining")
def test_a_job_that_is_stopped_leaves_the_others(tmp_path: Path) -> None:
    jobs = [job("a"), job("b", loss=partial(drives.slowly, seconds=0.02), steps=20)]
    results = together(tmp_path, jobs, guide=StopsOne())
    assert results["a"].outcome is Outcome.STOPPED
    assert len(results["a"].losses) < 6
    assert_as_alone(results, jobs[1:])
    assert len(results["b"].stretches) == 1


@pytest.mark.full
def test_a_fleet_with_a_common_base_goes_on_after_its_process_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    with driven(folder, "adapter_jobs") as driver:
        wait_for(lambda: all("saved" in events(folder / each.name) for each in drives.adapter_jobs()), driver)
        driver.kill()
    results = Fleet(folder).resume()
    assert_as_alone(results, drives.adapter_jobs())


@pytest.mark.full
def test_a_job_that_cannot_share_goes_on_in_another_way(tmp_path: Path) -> None:
    """Its loss draws from Python's random numbers, which only the first step shows."""
    jobs = [replace(job(name, loss=draws, seed=seed), exact=False) for seed, name in enumerate("ab")]
    fleet = Fleet(tmp_path, devices=[DEVICE], budget=BUDGET)
    results = fleet.run(jobs, techniques=["offload", "common base"])
    assert_as_alone(results, jobs)
    assert all(result.stretches[-1].technique == "offload" for result in results.values())


def in_double() -> nn.Module:
    torch.set_default_dtype(torch.float32)
    model = trainings.adapted(width=WIDTH)
    torch.set_default_dtype(torch.float64)  # of what its loss makes
    return model


def single_batches() -> list[list[tuple[Tensor, Tensor]]]:
    return [[(torch.randn(6, WIDTH, dtype=torch.float32), torch.randint(0, 5, (6,)))] for _ in range(5)]


def with_zeros(model: nn.Module, microbatch: Any) -> Tensor:
    return trainings.loss(model, microbatch) + torch.zeros(1).sum() + torch.tensor(1 / 3)


@pytest.fixture
def default_dtype() -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield before
    torch.set_default_dtype(before)


@pytest.mark.full
@pytest.mark.usefixtures("gaining")
def test_jobs_that_set_other_switches_go_on_in_another_way(tmp_path: Path, default_dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"loss": with_zeros, "data": single_batches, "exact": False, "evaluate": None}
    jobs = [job("single", **options), job("double", model=in_double, **options)]
    results = Fleet(tmp_path, devices=[DEVICE], budget=BUDGET).run(jobs, techniques=["offload", "common base"])
    for each in jobs:
        torch.set_default_dtype(default_dtype)
        assert_as_alone(results, [each])
    assert [result.stretches[0].technique for result in results.values()] == ["common base"] * 2
    assert results["single"].losses[6] != results["double"].losses[6]
