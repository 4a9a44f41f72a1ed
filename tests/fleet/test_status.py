"""A fleet's status and its past, from folders that were written by hand."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_ext.errors import JournalError
from hydra_ext.fleet import FleetState, JobState, history
from hydra_ext.fleet.cluster.progress import ProgressWriter, Track
from hydra_ext.fleet.journal import Journal
from hydra_ext.fleet.reporting import memory, status
from hydra_ext.fleet.reporting.status import FleetStatus, JobStatus
from support import fleet_folders
from support.fleet_folders import BEGIN, OPTIONS, Written


@contextmanager
def lived(folder: Path) -> Iterator[None]:
    """The lock that workers of a fleet hold."""
    descriptor = os.open(folder / "workers.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def at(folder: Path, seconds: float) -> FleetStatus:
    """The status of a fleet that runs, so many seconds after its beginning."""
    return status.of(history.load(folder, now=BEGIN + seconds), folder, runs=True)


def by_name(found: FleetStatus) -> dict[str, JobStatus]:
    return {job.name: job for job in found.jobs}


def test_a_fleet_that_runs_says_how_far_each_job_is(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    found = at(tmp_path, 18.0)
    jobs = by_name(found)
    assert (found.state, found.seconds) == (FleetState.RUNNING, 18.0)
    assert {name: job.state for name, job in jobs.items()} == {
        "a": JobState.DONE,
        "b": JobState.RUNNING,
        "c": JobState.SET_ASIDE,
        "d": JobState.WAITING,
    }
    b = jobs["b"]
    assert (b.technique, b.node, b.devices) == ("pipeline", "here", (0, 1))
    assert (b.step, b.steps, b.loss) == (8, 10, 2.0 / 8)
    assert b.step_seconds == 0.5  # of its second step: the first one takes longer
    assert b.eta_seconds == 2 * 0.5
    assert b.failures == ("rank 0 was killed by signal -9",)
    assert (jobs["d"].technique, jobs["d"].devices) == ("plain", ())
    assert jobs["d"].eta_seconds == found.eta_seconds == 16.0 + 14.0 - 18.0  # the newest plan's
    assert jobs["a"].eta_seconds is None


def test_a_plan_that_is_late_does_not_end_before_the_jobs_that_run(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a", steps=100)])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 5.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    assert at(tmp_path, 2.0).eta_seconds == 100 * 1.0  # of the trial, before there are two steps
    written.steps(1.0, "a", 7, 1, 3, seconds=2.0)
    found = at(tmp_path, 8.0)
    assert found.eta_seconds == by_name(found)["a"].eta_seconds == 97 * 2.0


def test_jobs_that_wait_are_as_late_as_those_before_them(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job(name, lr=rate) for name, rate in (("a", 1), ("b", 2), ("c", 3))])
    written.measured("a", OPTIONS)
    written.plan(0.0, a=(0, 0.0, 10.0), b=(0, 10.0, 20.0), c=(0, 0.0, 12.0))
    written.start(0.0, "a", 7, 0, "plain", 0)
    written.steps(0.0, "a", 7, 1, 4, seconds=3.0)
    found = at(tmp_path, 12.0)
    etas = {name: job.eta_seconds for name, job in by_name(found).items()}
    late = (12.0 + 6 * 3.0) - 10.0  # of a, when it ends
    assert etas == {"a": 6 * 3.0, "b": 20.0 + late - 12.0, "c": 12.0}  # c is not behind a, and takes its whole time
    assert found.eta_seconds == etas["b"]


def test_a_job_that_was_asked_to_move_is_moving_until_its_gang_ends(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 5.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.note("move", 2.0, job="a", option=2)
    assert at(tmp_path, 2.5).jobs[0].state is JobState.MOVING
    written.end(3.0, "a", 7, 1, "moving")
    assert at(tmp_path, 3.0).jobs[0].state is JobState.WAITING
    assert [(move.technique, move.devices) for move in history.load(tmp_path).jobs["a"].moves] == [("pipeline", 2)]


def test_jobs_may_be_stopped_restarted_and_added(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 5.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.steps(1.0, "a", 7, 1, 3)
    written.progress(4.0, "a", 7, "saved", 3, seconds=0.1)
    written.end(4.0, "a", 7, 3, "stopping")
    written.note("stopped", 4.0, job="a", step=3)
    written.note("add", 4.5, job=fleet_folders.job("b", steps=20).describe(), parent=None, step=0)
    jobs = by_name(at(tmp_path, 5.0))
    assert [(job.state, job.step, job.steps) for job in jobs.values()] == [
        (JobState.STOPPED, 3, 10),
        (JobState.WAITING, 0, 20),
    ]
    assert (jobs["a"].technique, jobs["a"].eta_seconds) == ("plain", None)
    written.note("restart", 5.0, job="a")
    assert by_name(at(tmp_path, 5.0))["a"].state is JobState.WAITING


def test_the_lock_of_the_workers_is_the_sign_of_life(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    with lived(tmp_path):
        assert status.read(tmp_path).state is FleetState.MEASURING
        written.measured("a", OPTIONS)
        written.plan(1.0, a=(0, 0.0, 5.0))
        assert status.read(tmp_path).state is FleetState.RUNNING
    stopped = status.read(tmp_path)
    assert stopped.state is FleetState.STOPPED
    assert stopped.eta_seconds is None
    assert "its process has ended" in str(stopped)
    written.note("finished", 6.0)
    assert status.read(tmp_path).state is FleetState.FINISHED


def test_a_fleet_whose_workers_are_on_other_machines_runs_as_long_as_its_journal_is_open(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    opened = Journal(tmp_path)
    assert status.read(tmp_path).state is FleetState.RUNNING
    opened.close()
    assert status.read(tmp_path).state is FleetState.STOPPED


def test_a_job_of_a_killed_fleet_has_the_steps_of_its_checkpoint(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    b = by_name(status.read(tmp_path))["b"]
    assert (b.state, b.step, b.loss, b.devices, b.memory_bytes) == (JobState.WAITING, 6, 2.0 / 6, (), None)


def test_stretches_of_a_killed_fleet_end_with_its_last_step_and_time_stands_until_it_goes_on(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 10.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.steps(1.0, "a", 7, 1, 3)
    killed = history.load(tmp_path)
    assert killed.seconds == 4.0
    written.begin(4.0, idle=1000.0)
    written.plan(5.0, a=(0, 0.0, 10.0))
    written.start(5.0, "a", 8, 0, "plain", 1)
    written.steps(5.0, "a", 8, 1, 10)
    written.progress(16.0, "a", 8, "done", 10, evaluation=None)
    written.end(16.0, "a", 8, 10, "done")
    written.note("finished", 16.0)
    past = history.load(tmp_path)
    first, second = past.jobs["a"].stretches
    assert (first.start, first.end, first.steps, first.failure) == (1.0, 4.0, 3, history.FLEET_ENDED)
    assert (second.start, second.end, second.steps, second.failure) == (5.0, 16.0, 10, None)
    assert (past.seconds, past.next_gang, past.is_finished) == (16.0, 9, True)
    assert by_name(status.read(tmp_path))["a"].failures == ()  # it was no failure of the job


def test_a_step_after_the_next_beginning_does_not_make_a_stretch_longer(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 10.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.steps(1.0, "a", 7, 1, 3)
    written.progress(99.0, "a", 7, "step", 4, loss=0.0, seconds=95.0)  # while the fleet does not run
    written.begin(4.5, idle=1000.0)
    (stretch,) = history.load(tmp_path).jobs["a"].stretches
    assert (stretch.start, stretch.end) == (1.0, 4.5)


def test_a_job_that_is_done_has_not_failed_because_the_fleet_ended_before_its_processes(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a")])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 10.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.steps(1.0, "a", 7, 1, 10)
    written.progress(11.5, "a", 7, "done", 10, evaluation=None)
    for past in (history.load(tmp_path), history.load(tmp_path, now=BEGIN + 13.0)):
        (stretch,) = past.jobs["a"].stretches
        assert (stretch.end, stretch.steps, stretch.failure) == (11.5, 10, None)
    found = by_name(at(tmp_path, 13.0))["a"]
    assert (found.state, found.devices) == (JobState.DONE, ())


def test_plans_name_their_options_also_after_one_was_removed(tmp_path: Path) -> None:
    written = Written(tmp_path, [fleet_folders.job("a"), fleet_folders.job("b", lr=0.5)])
    written.measured("a", OPTIONS)
    written.plan(1.0, a=(0, 0.0, 9.0), b=(2, 9.0, 19.0))
    written.start(1.0, "a", 7, 0, "plain", 0)
    written.end(2.0, "a", 7, 0, "running", "WontDo: the optimizer's state takes more")
    written.plan(2.0, a=(0, 0.0, 9.0), b=(2, 9.0, 19.0))
    written.begin(3.0, idle=9.0)  # which begins with all options
    written.plan(3.0, a=(0, 0.0, 9.0), b=(2, 9.0, 19.0))
    named = [
        {name: (job.technique, job.devices) for name, job in plan.jobs.items()} for plan in history.load(tmp_path).plans
    ]
    plain, offload, pipeline = (("plain", 1), ("offload", 1), ("pipeline", 2))
    assert named == [{"a": plain, "b": pipeline}, {"a": offload, "b": pipeline}, {"a": plain, "b": pipeline}]


def test_jobs_that_differ_in_numbers_of_their_optimizer_were_measured_together(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    past = history.load(tmp_path)
    assert past.measured_of("a") is past.measured_of("b") is not past.measured_of("c")
    assert past.measured_of("c") is past.measured_of("d") is not None


def test_results_of_a_fleet_that_has_not_ended_are_open(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    rows = {row["job"]: row for row in history.results(history.load(tmp_path)).rows()}
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "done",
        "b": "open",
        "c": "set aside",
        "d": "open",
    }
    assert rows["a"]["evaluation"] == 0.125
    assert rows["b"]["runs"] == 3


# ---- folders that hold no fleet -------------------------------------------------------------------------------------
@pytest.mark.every_case
@pytest.mark.parametrize("text", [None, b"", b"deadbeef {}\n", b'39d4ff33 {"event":"fle', b"torn"])
def test_a_folder_without_a_whole_fleet_is_an_error(text: bytes | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "journal.jsonl").write_bytes(text)
    with pytest.raises(JournalError, match=r"holds no fleet|is damaged") as raised:
        status.read(tmp_path)
    assert raised.value.file == tmp_path / "journal.jsonl"


def test_a_half_written_entry_is_not_read(tmp_path: Path) -> None:
    written = fleet_folders.eventful(tmp_path)
    before = at(tmp_path, 18.0)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'00000000 {"event":"finis')
    with (tmp_path / "b" / "progress.jsonl").open("ab") as file:
        file.write(b'{"event":"step","gang":15,"st')
    assert at(tmp_path, 18.0) == before
    written.progress(18.0, "b", 15, "step", 9, loss=0.5, seconds=0.5)  # on a line of its own
    assert by_name(at(tmp_path, 18.0))["b"].loss == 0.5


# ---- progress -------------------------------------------------------------------------------------------------------
RECORDS = st.lists(
    st.tuples(st.sampled_from(["opened", "step", "saved", "stopped", "done"]), st.integers(0, 9), st.integers(1, 3)),
    max_size=20,
)


@given(RECORDS, st.sets(st.integers(0, 19)))
def test_a_track_that_is_read_on_says_the_same_as_one_that_is_read_at_once(
    records: list[tuple[str, int, int]], looks: set[int]
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "progress.jsonl"
        track = Track(path)
        for number, (event, step, gang) in enumerate(records):
            writer = ProgressWriter(path, gang)
            writer.write(event, step, time=float(number), loss=number / 2, seconds=number / 4)
            writer.close()
            if number in looks:
                track.read_on()
        assert track.read_on() == Track(path).read_on()
        # A plain recurrence over the records is the oracle.
        losses: dict[int, float] = {}
        for number, (event, step, _) in enumerate(records):
            if event == "opened":  # steps behind the checkpoint are made again
                losses = {each: loss for each, loss in losses.items() if each <= step}
            elif event == "step":
                losses[step] = number / 2
        assert track.losses == losses
        assert track.ends == {gang: (float(n), step) for n, (_, step, gang) in enumerate(records)}
        assert track.saved == ([0] + [step for event, step, _ in records if event in ("saved", "done")])[-1]
        assert track.is_done == any(event == "done" for event, _, _ in records)


# ---- as text and JSON -----------------------------------------------------------------------------------------------
def test_the_table_has_a_line_for_each_job_and_the_failures_below(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    lines = str(at(tmp_path, 18.0)).splitlines()
    assert lines[0] == f"{tmp_path}: 2 of 4 jobs have ended after 18 s; the fleet runs, about 12 s left"
    assert [line.split() for line in lines[1:6]] == [
        ["job", "state", "technique", "devices", "steps", "loss", "s/step", "left", "memory", "failures"],
        ["a", "done", "plain", "-", "10/10", "0.2", "-", "-", "-", "0"],
        ["b", "running", "pipeline", "here:0,1", "8/10", "0.25", "0.5", "1", "s", "-", "1"],
        ["c", "set", "aside", "plain", "-", "0/10", "-", "-", "-", "-", "1"],
        ["d", "waiting", "plain", "-", "0/10", "-", "-", "12", "s", "-", "0"],
    ]
    assert lines[6:] == ["b: rank 0 was killed by signal -9", "c: ValueError: <no> such data"]


def test_memory_is_shown_in_mebibytes(tmp_path: Path) -> None:
    fleet_folders.eventful(tmp_path)
    job = at(tmp_path, 18.0).jobs[1]
    assert replace(job, memory_bytes=1234 * 2**20).cells()[8] == "1,234 MiB"


def test_a_loss_that_is_no_number_is_still_json(tmp_path: Path) -> None:
    written = fleet_folders.eventful(tmp_path)
    written.progress(18.0, "b", 15, "step", 9, loss=float("nan"), seconds=0.5)
    found = json.loads(json.dumps(at(tmp_path, 18.0).as_dict(), allow_nan=False))
    assert {job["name"]: job["loss"] for job in found["jobs"]} == {"a": 0.2, "b": "nan", "c": None, "d": None}
    assert found["state"] == "running"
    assert found["jobs"][2]["failures"] == ["ValueError: <no> such data"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (12.345, "12.3 s"),
        (60.0, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_durations_are_in_units_for_people(seconds: float | None, text: str) -> None:
    assert status.duration(seconds) == text


def test_memory_is_that_of_the_processes_that_write_to_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert memory.resident_bytes(log) is None
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file)
    assert (memory.resident_bytes(log) or 0) > 100_000
    process.communicate(b"\n")
    assert memory.resident_bytes(log) is None
