"""What people and guides ask of a fleet while it runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import hydra_ext
from hydra_ext.errors import InvalidArgument, JournalError
from hydra_ext.fleet import Fleet, Guide, Job, JobResult, Outcome, SuccessiveHalving, control
from hydra_ext.fleet.control import Request, Wish
from support.fleet import drives, trainings
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import driven, events, wait_for


def test_jobs_are_stopped_cloned_and_restarted_while_others_run(tmp_path: Path) -> None:
    """A clone has weights, moments and steps of its parent, and a learning rate of its own."""
    folder = tmp_path / "fleet"
    fleet = Fleet(folder)
    clone = trainings.job("clone", lr=3e-3, steps=30, schedule=None, max_norm=None, loss=drives.SLOW)
    with driven(folder, "two_jobs") as driver:
        wait_for(lambda: "saved" in events(folder / "parent"), driver)
        fleet.stop("parent")
        wait_for(lambda: "stopped" in events(folder / "parent"), driver)
        assert "done" not in events(folder / "other")
        fleet.add(clone, parent="parent")
        wait_for(lambda: "done" in events(folder / "clone"), driver)
        fleet.restart("parent")
        assert driver.wait(drives.PATIENCE) == 0
    results = Fleet(folder).resume()
    assert_as_alone(results, drives.two_jobs())
    stopped = results["parent"].stretches[0].steps
    assert min(results["clone"].losses) == stopped + 1
    weights = _changed_in_the_middle(drives.two_jobs()[0], clone, stopped, threads=results.threads or 1)
    found = trainings.loaded(results["clone"].folder, clone)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def _changed_in_the_middle(job: Job, clone: Job, step: int, *, threads: int) -> dict[str, torch.Tensor]:
    """The plain loop of one job, whose learning rate becomes the clone's after some steps."""
    torch.set_num_threads(threads)
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, rate = job.optimizer(model.parameters()), clone.optimizer.keywords["lr"]  # type: ignore[attr-defined]
    torch.manual_seed(hydra_ext.fleet.job.seed_of(job.seed, "data"))
    data = list(job.data())
    for number in range(clone.steps):
        if number == step:
            optimizer.param_groups[0]["lr"] = rate
        for microbatch, seed in zip(data[number % len(data)], clone.seeds(number, 2), strict=True):
            torch.manual_seed(seed)
            (job.loss(model, microbatch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


class Proposing(Guide):
    """Two jobs at a time, four in all; the second kind was not measured before."""

    def __init__(self) -> None:
        self.left = [
            trainings.job(f"proposed-{i}", lr=10.0**-i, steps=6, model=partial(trainings.layered, blocks=blocks))
            for i, blocks in enumerate((2, 2, 3, 3), 1)
        ]
        self.jobs = {job.name: job for job in self.left}
        self.results: dict[str, JobResult] = {}

    def propose(self, running: int) -> Sequence[Job]:
        taken, self.left = self.left[: 2 - running], self.left[2 - running :]
        return taken

    def ended(self, result: JobResult) -> None:
        self.results[result.name] = result


def test_a_guide_proposes_jobs_while_others_run(tmp_path: Path) -> None:
    guide = Proposing()
    results = Fleet(tmp_path, devices=2, budget="1MiB").run([], techniques=["plain"], guide=guide)
    assert_as_alone(results, list(guide.jobs.values()))
    assert {name: result.outcome for name, result in guide.results.items()} == dict.fromkeys(results, Outcome.DONE)


def test_a_guide_stops_jobs_that_fall_behind(tmp_path: Path) -> None:
    jobs = [trainings.job(f"rate-{i}", lr=10.0**-i, steps=27) for i in range(1, 5)]
    guide = SuccessiveHalving(first=3, factor=3)
    results = Fleet(tmp_path, devices=2, budget="1MiB").run(jobs, techniques=["plain"], guide=guide)
    outcomes = [job.outcome for job in results.values()]
    assert outcomes.count(Outcome.STOPPED) >= 1
    assert outcomes.count(Outcome.DONE) >= 1
    for job in jobs:
        _, losses, _ = trainings.plainly(job, threads=results.threads or 1)
        found = results[job.name]
        assert [found.losses[step] for step in sorted(found.losses)] == losses[: len(found.losses)]
        assert (found.folder / "..").resolve().name == job.name
        assert hydra_ext.load_model(found.folder, job.model()).step == len(found.losses)


@pytest.mark.full
def test_a_new_job_that_fits_nowhere_is_set_aside_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide = Proposing()
    guide.left[2] = trainings.job("proposed-3", steps=6, model=partial(trainings.layered, width=-1))
    with caplog.at_level(logging.ERROR):
        results = Fleet(tmp_path, devices=2, budget="1MiB").run([], techniques=["plain"], guide=guide)
    assert results["proposed-3"].outcome is Outcome.SET_ASIDE
    assert "cannot be built" in results["proposed-3"].failures[0]
    assert [results[f"proposed-{i}"].outcome for i in (1, 2, 4)] == [Outcome.DONE] * 3


def test_requests_are_checked(tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        Fleet(tmp_path).stop("a")
    results = Fleet(tmp_path, devices=1, budget="1MiB").run([trainings.job("a", steps=1)], techniques=["plain"])
    assert results["a"].is_done
    with pytest.raises(InvalidArgument, match="has no job 'b': there are a"):
        Fleet(tmp_path).restart("b")
    with pytest.raises(InvalidArgument, match="there is a job 'a' in"):
        Fleet(tmp_path).add(trainings.job("a"))
    Fleet(tmp_path).add(trainings.job("late", steps=2))
    late = Fleet(tmp_path).resume()
    assert_as_alone(late, [trainings.job("a", steps=1), trainings.job("late", steps=2)])


def test_a_request_that_cannot_be_read_is_set_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "requests").mkdir()
    for name, text in (("1", "{"), ("2", "[]"), ("3", '{"wish": "fly"}')):
        (tmp_path / "requests" / f"{name}.json").write_text(text)
    control.ask(tmp_path, Request(wish=Wish.STOP, name="a"))
    with caplog.at_level(logging.CRITICAL):
        assert [request.name for request in control.requests(tmp_path)] == ["a"]
    assert len(list((tmp_path / "requests").glob("*.damaged"))) == 3
    assert not control.is_asked(tmp_path)


class Listener(Guide):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.ends: list[tuple[str, Outcome]] = []

    def stops(self, job: str, step: int, loss: float) -> bool:
        self.heard.append((job, step))
        return False

    def ended(self, result: JobResult) -> None:
        self.ends.append((result.name, result.outcome))


def test_a_guide_of_a_fleet_that_goes_on_hears_all_that_has_happened(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, devices=1, budget="1MiB")
    fleet.run([trainings.job("a", steps=2)], techniques=["plain"])
    fleet.add(trainings.job("b", steps=1))
    listener = Listener()
    fleet.resume(guide=listener)
    assert listener.heard == [("a", 1), ("a", 2), ("b", 1)]
    assert listener.ends == [("a", Outcome.DONE), ("b", Outcome.DONE)]
