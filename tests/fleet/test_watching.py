"""One small fleet of real processes, watched by a tracker while it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from hydra_ext.fleet import Fleet, FleetState, FleetStatus, JobState, Results, history
from support import fleet_folders
from support.fleet_folders import Recorder

STEPS = 6


class Watcher(Recorder):
    """Reads the status at each step, in the thread that runs the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        self.seen: list[FleetStatus] = []

    def job_step(self, job: str, step: int, loss: float, seconds: float) -> None:
        super().job_step(job, step, loss, seconds)
        self.seen.append(self._fleet.status())


class Watched(NamedTuple):
    fleet: Fleet
    results: Results
    watcher: Watcher


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    fleet = Fleet(tmp_path_factory.mktemp("fleet") / "small", devices=1, budget="1MiB")
    watcher = Watcher(fleet)
    jobs = [fleet_folders.job("a", steps=STEPS), fleet_folders.job("b", steps=STEPS, lr=0.01)]
    return Watched(fleet, fleet.run(jobs, techniques=["plain"], trackers=[watcher]), watcher)


def test_trackers_hear_every_step_of_every_job(watched: Watched) -> None:
    steps = [entry[1:4] for entry in watched.watcher.heard if entry[0] == "step"]
    assert sorted(steps) == [
        (name, step, job.losses[step]) for name, job in watched.results.items() for step in job.losses
    ]
    assert [len(job.losses) for job in watched.results.values()] == [STEPS, STEPS]
    rest = [entry for entry in watched.watcher.heard if entry[0] != "step"]
    assert sorted(rest[:2]) == [("ended", "a", True, None), ("ended", "b", True, None)]
    assert rest[2:] == [("close",)]


def test_the_status_of_a_fleet_that_runs_is_read_from_its_files(watched: Watched) -> None:
    first = watched.watcher.seen[0]
    assert {status.state for status in watched.watcher.seen} == {FleetState.RUNNING}
    running = [job for job in first.jobs if job.state is JobState.RUNNING]
    done = [job for job in first.jobs if job.state is JobState.DONE]  # its last record may be there already
    waiting = [job for job in first.jobs if job.state is JobState.WAITING]
    assert (len(running) + len(done), len(waiting)) == (1, 1)
    assert waiting[0].technique == "plain"
    assert (waiting[0].step, waiting[0].steps) == (0, STEPS)
    assert first.eta_seconds is not None
    for job in running:
        assert (job.technique, job.node, job.devices) == ("plain", "here", (0,))
        assert job.step >= 1


def test_the_past_of_a_real_fleet_is_whole(watched: Watched) -> None:
    final = watched.fleet.status()
    assert final.state is FleetState.FINISHED
    assert [(job.state, job.step) for job in final.jobs] == [(JobState.DONE, STEPS)] * 2
    past = history.load(watched.fleet.folder)
    assert [set(plan.jobs) for plan in past.plans][:1] == [{"a", "b"}]
    stretches = sorted((s.start, s.end) for job in past.jobs.values() for s in job.stretches)
    assert len(stretches) == 2
    assert 0.0 < stretches[0][0] < stretches[0][1] <= stretches[1][0] < stretches[1][1] <= past.seconds
    assert [s.failure for job in past.jobs.values() for s in job.stretches] == [None, None]
    assert all(job.technique == "plain" for job in past.plans[0].jobs.values())


def test_its_report_shows_what_ran(watched: Watched, tmp_path: Path) -> None:
    watched.fleet.write_report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert len(re.findall(r'<rect [^>]*class="bar', text)) == 4  # two planned, two that ran
    assert "2 of 2 jobs have ended" in text
