"""Fleets of real processes: numbers, mishaps, and going on after the fleet's own process has ended."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hydra_ext
from hydra_ext.errors import FleetInUse, InvalidArgument, InvalidJob, JobDoesNotFit, JobFailed, JournalError
from hydra_ext.fleet import Fleet, Results
from hydra_ext.fleet import devices as fleet_devices
from hydra_ext.fleet.cluster.embedded import EmbeddedCluster, is_locked
from hydra_ext.fleet.cluster.interface import Ended, Event, Order, Task
from hydra_ext.fleet.journal import Journal, read_only
from hydra_ext.fleet.scheduling.settings import Settings
from support.fleet import drives, trainings
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import PATIENCE, children, driven, events, is_alive, wait_for, wait_until

BUDGET = "1MiB"


def techniques_of(results: Results) -> dict[str, list[str]]:
    return {name: [stretch.technique for stretch in job.stretches] for name, job in results.items()}


@pytest.mark.parametrize("technique", ["plain", "offload", "pipeline"])
@pytest.mark.cases(1)
def test_jobs_have_the_bits_of_the_plain_loop(technique: str, tmp_path: Path) -> None:
    ours = partial(hydra_ext.optim.AdamW, lr=1e-2)
    jobs = [trainings.job("a", optimizer=ours), trainings.job("b", lr=1e-3, max_norm=None, schedule=None, seed=3)]
    if technique != "pipeline":
        jobs.append(trainings.job("drawing", dropout=0.3))
    results = Fleet(tmp_path, devices=2, budget=BUDGET).run(jobs, techniques=[technique])
    assert_as_alone(results, jobs)
    assert all(each == [technique] for each in techniques_of(results).values())


def test_mishaps_are_answered_and_others_go_on(tmp_path: Path) -> None:
    """A loss raises twice, two processes are killed, one hangs, and one job fails at the same step again and again.

    An evaluation that takes longer than the patience is no mishap.
    """
    losses: dict[str, Any] = {
        what: partial(trainings.mishap, what=what, folder=trainings.tokens(tmp_path / what, count), after=14)
        for what, count in (("raise", 2), ("kill", 2), ("hang", 1))
    }
    losses["none"] = trainings.slow_judge
    jobs = [trainings.job(what, loss=loss, steps=20) for what, loss in losses.items()]
    unjudged = trainings.job("unjudged", evaluate=trainings.no_evaluation, steps=6)
    hopeless = trainings.job("hopeless", data=partial(trainings.Stream, 7, fails=True))
    results = Fleet(tmp_path / "fleet", devices=2, budget=BUDGET).run(
        [*jobs, unjudged, hopeless], techniques=["plain"], patience=2.0, interval=1e-3
    )
    assert_as_alone(results, [trainings.job(job.name, steps=20) for job in jobs])
    assert {name: len(job.stretches) for name, job in results.items()} == {
        "raise": 3,
        "kill": 3,
        "hang": 2,
        "none": 1,
        "unjudged": 3,
        "hopeless": 3,
    }
    assert not results["hopeless"].is_done
    assert "evaluate gave no microbatch" in results["unjudged"].failures[-1]
    assert hydra_ext.load_model(results["unjudged"].folder, trainings.layered()).step == 6
    assert len(results["hopeless"].losses) == 7
    assert "OSError: the data cannot be read" in results["hopeless"].failures[-1]
    assert "killed by signal 9" in str(results["kill"].stretches[0].failure)
    assert "no step for 2 s" in str(results["hang"].stretches[0].failure)
    with pytest.raises(JobFailed, match="2 of 6 jobs were set aside: unjudged: InvalidJob"):
        results.raise_failures()


def test_a_fleet_whose_process_was_killed_goes_on(tmp_path: Path) -> None:
    """Jobs that were running go on from their checkpoints; one that was done is not run again."""
    folder = tmp_path / "fleet"
    with driven(folder, "three_jobs") as driver:
        wait_for(lambda: "done" in events(folder / "short") and "done" in events(folder / "other"), driver)
        with pytest.raises(FleetInUse, match="another process runs a fleet"):
            Fleet(folder).resume()
        driver.kill()
    results = Fleet(folder).resume()
    assert_as_alone(results, drives.three_jobs())
    assert len(results["short"].stretches) == 1
    assert str(results["long"].stretches[0].failure) == "the fleet's process had ended"
    assert len([each for each in read_only(folder) if each["event"] == "measured"]) == 1
    assert Fleet(folder).resume().rows() == results.rows()


def test_workers_end_with_the_process_that_they_are_forked_from(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    with driven(folder, "three_jobs") as driver:
        wait_for(lambda: "saved" in events(folder / "long"), driver)
        (zygote,) = children(driver.pid)
        workers = children(zygote)
        assert workers
        os.kill(zygote, signal.SIGKILL)
        assert driver.wait(PATIENCE) == 1
        wait_until(lambda: not any(is_alive(worker) for worker in workers))
    assert_as_alone(Fleet(folder).resume(), drives.three_jobs())


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_a_job_that_fits_nowhere_names_the_smallest_budget(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, devices=1, budget="4KiB")
    with pytest.raises(
        JobDoesNotFit, match="job 'large' fits no device: give each device a budget of at least"
    ) as told:
        fleet.run([trainings.job("large", dropout=0.2)], techniques=["plain", "offload"])
    needed = told.value.smallest_budget
    assert needed is not None
    assert set(told.value.reasons) == {"plain on 1", "offload on 1"}
    assert not (tmp_path / "large").exists()
    enough = Fleet(tmp_path, devices=1, budget=needed)  # in the same folder: nothing has run there
    assert enough.run([trainings.job("large", steps=2, dropout=0.2)])["large"].is_done
    with pytest.raises(InvalidArgument, match="has other devices or another budget: leave them out"):
        fleet.resume()


def test_a_job_that_cannot_be_built_is_told_before_anything_runs(tmp_path: Path) -> None:
    jobs = [trainings.job("sound"), trainings.job("unsound", model=partial(trainings.layered, width=-1))]
    with pytest.raises(InvalidJob, match="job 'unsound' cannot be built: RuntimeError"):
        Fleet(tmp_path, devices=1, budget=BUDGET).run(jobs)
    assert not (tmp_path / "sound").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "a job is named 'a/b'"),
        ({"name": "trials"}, "a job is named 'trials', which a fleet's folder has itself"),
        ({"steps": 0}, "steps=0: give a number of steps"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
        ({"max_norm": -1.0}, "max_norm=-1.0: give a positive number"),
        ({"loss": 3}, "loss is a int: give a function"),
        ({"delayed": True}, "delayed=True takes gradients of older weights"),
    ],
)
@pytest.mark.every_case
def test_jobs_are_checked_when_they_are_made(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        trainings.job(**{"name": "a", **change})  # type: ignore[arg-type]


def test_fleets_are_checked_before_anything_changes(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "new", devices=1, budget=BUDGET)
    with pytest.raises(InvalidJob, match="two jobs are named 'a'"):
        fleet.run([trainings.job("a"), trainings.job("a")])
    with pytest.raises(InvalidJob, match="jobs is empty"):
        fleet.run([])
    with pytest.raises(InvalidJob, match="which other processes cannot find by its name"):
        fleet.run([trainings.job("a", loss=lambda model, microbatch: model(microbatch))])
    with pytest.raises(InvalidArgument, match="'none' cannot be found: give one of 'plain'"):
        fleet.run([trainings.job("a")], techniques=["none"])
    with pytest.raises(InvalidArgument, match="interval=0: give a positive number"):
        fleet.run([trainings.job("a")], interval=0)
    with pytest.raises(JournalError, match="has no fleet: start one"):
        fleet.resume()
    assert not (tmp_path / "new").exists()
    with pytest.raises(InvalidArgument, match="devices=0: give a number"):
        Fleet(tmp_path / "new", devices=0).run([trainings.job("a")])


def test_a_folder_has_one_fleet(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(FleetInUse):
        Fleet(tmp_path, devices=1, budget=BUDGET).run([trainings.job("a")])
    journal.write("fleet", jobs=[])
    journal.close()
    with pytest.raises(InvalidArgument, match="has a fleet already: call resume"):
        Fleet(tmp_path, devices=1, budget=BUDGET).run([trainings.job("a")])
    with pytest.raises(JournalError, match="is of version None, and this is version 1"):
        Fleet(tmp_path).resume()


def endless(folder: Path, gang: int, technique: str, **configuration: Any) -> Order:
    """An order that only a request ends."""
    return Order(
        gang=gang,
        task=Task.TRAIN,
        job=trainings.job("a", steps=10**6).describe(),
        folder=str(folder / str(gang)),
        devices=[fleet_devices.choose(1, BUDGET)[0].describe()],
        settings=Settings(interval=1e3, patience=1e3, path=sys.path),
        technique=technique,
        configuration=configuration,
    )


def ends_of(cluster: EmbeddedCluster) -> list[Event]:
    """The next ends of gangs."""
    while True:
        if found := [event for event in cluster.wait(PATIENCE) if isinstance(event, Ended)]:
            return list[Event](found)


def test_a_gang_that_is_stopped_at_once_saves_and_ends(tmp_path: Path) -> None:
    """The request comes before the process has begun, and is not lost."""
    cluster = EmbeddedCluster(fleet_devices.choose(1, BUDGET), locks=[tmp_path / "lock"])
    try:
        for gang in range(4):
            cluster.start([endless(tmp_path, gang, "plain", bytes=0)], "here", [0])
            cluster.stop(gang)
            assert ends_of(cluster) == [Ended(gang=gang, failure=None)]
            assert "stopped" in events(tmp_path / str(gang))
    finally:
        cluster.close()


def test_a_lock_can_be_given_up_for_a_gang_that_has_left_its_process(tmp_path: Path) -> None:
    """Its job may go on in another process, while the one that shared its device goes on in this one."""
    locks = [tmp_path / str(gang) / "lock" for gang in range(2)]
    for lock in locks:
        lock.parent.mkdir()
    cluster = EmbeddedCluster(fleet_devices.choose(1, BUDGET), locks=locks)
    try:
        cluster.start([endless(tmp_path, gang, "shared offload") for gang in range(2)], "here", [0])
        cluster.stop(0)
        assert ends_of(cluster) == [Ended(gang=0, failure=None)]
        assert [is_locked(lock) for lock in locks] == [True, True]
        cluster.unlock(locks[0])
        assert [is_locked(lock) for lock in locks] == [False, True]
        cluster.stop(1)
        assert ends_of(cluster) == [Ended(gang=1, failure=None)]
    finally:
        cluster.close()
    assert [is_locked(lock) for lock in locks] == [False, False]
