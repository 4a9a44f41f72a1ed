"""Techniques change in the middle of a job, and a user's own is one of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import hydra_ext
from hydra_ext.errors import JobDoesNotFit
from hydra_ext.fleet import Fleet
from support.fleet import trainings
from support.fleet.comparison import assert_as_alone
from support.fleet.trainings import loaded, plainly

BUDGET = "1MiB"
OURS = partial(hydra_ext.optim.AdamW, lr=1e-2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("order", [("plain", "offload", "pipeline"), ("pipeline", "plain", "offload")])
def test_a_job_that_goes_through_several_techniques_has_the_bits_of_the_plain_loop(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    """Each fleet goes on from the checkpoints of the one before."""
    for steps, technique in zip((4, 8, 12), order, strict=True):
        job = trainings.job("a", optimizer=OURS, steps=steps)
        folder = tmp_path / str(steps)
        if steps > 4:
            (folder / "a").mkdir(parents=True)
            (tmp_path / str(steps - 4) / "a" / "ckpt").rename(folder / "a" / "ckpt")
        results = Fleet(folder, devices=2, budget=BUDGET).run([job], techniques=[technique])
        assert [stretch.technique for stretch in results["a"].stretches] == [technique]
        assert set(results["a"].losses) == set(range(steps - 3, steps + 1))
    weights, losses, _ = plainly(job, threads=results.threads or 1)
    assert results["a"].loss == losses[-1]
    found = loaded(results["a"].folder, job)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.full
@pytest.mark.parametrize("technique", ["data parallel", "fsdp"])
def test_techniques_with_other_sums_stay_within_their_bound(technique: str, tmp_path: Path) -> None:
    """Two stretches, so that a checkpoint is loaded; with exact=True they are refused, with the bound."""
    data = partial(trainings.batches, microbatches=4)
    for steps in (3, 6):
        job = trainings.job("a", exact=False, steps=steps, data=data, model=partial(trainings.layered, normed=False))
        folder = tmp_path / str(steps)
        if steps > 3:
            (folder / "a").mkdir(parents=True)
            (tmp_path / "3" / "a" / "ckpt").rename(folder / "a" / "ckpt")
        results = Fleet(folder, devices=2, budget=BUDGET).run([job], techniques=[technique])
        assert [stretch.technique for stretch in results["a"].stretches] == [technique]
    weights, losses, evaluation = plainly(job, threads=results.threads or 1)
    found = loaded(results["a"].folder, job)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
    assert results["a"].loss == pytest.approx(losses[-1], rel=1e-5)
    assert results["a"].evaluation == pytest.approx(evaluation, rel=1e-4)


def test_a_technique_of_a_user_is_asked_and_taken(tmp_path: Path) -> None:
    jobs = [trainings.job("a", steps=4)]
    results = Fleet(tmp_path, devices=1, budget=BUDGET).run(jobs, techniques=["support.fleet.own_technique:Checked"])
    assert_as_alone(results, jobs)
    assert [stretch.technique for stretch in results["a"].stretches] == ["checked"]


def test_a_technique_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    """The plain loop is tried to compare with, though it was not asked for."""
    with pytest.raises(JobDoesNotFit, match="faster on 1: its losses or weights differ from the plain loop's"):
        Fleet(tmp_path, devices=1, budget=BUDGET).run(
            [trainings.job("a", steps=4, schedule=None)], techniques=["support.fleet.own_technique:Faster"]
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("technique", ["offload", "plain", "pipeline"])
def test_a_job_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(technique: str, tmp_path: Path) -> None:
    for steps in (3, 6):
        job = trainings.job("a", optimizer=OURS, steps=steps)
        folder = tmp_path / str(steps)
        if steps > 3:
            (folder / "a").mkdir(parents=True)
            (tmp_path / "3" / "a" / "ckpt").rename(folder / "a" / "ckpt")
            newest = max((folder / "a" / "ckpt").glob("step-*"), key=lambda each: each.name)
            largest = max(newest.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
            damaged = bytearray(largest.read_bytes())
            damaged[-1] ^= 1
            largest.write_bytes(damaged)
        results = Fleet(folder, devices=2, budget=BUDGET).run([job], techniques=[technique], interval=1e-3)
        assert not results["a"].failures
    assert set(results["a"].losses) == {3, 4, 5, 6}
    assert_as_alone(results, [job], first=3)
