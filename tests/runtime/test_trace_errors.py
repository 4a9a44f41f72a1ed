"""``run.trace`` where something goes wrong: typed errors, and a file with what there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hydra_ext
from hydra_ext import Checks, Run
from hydra_ext.errors import StateError, TraceFileError
from hydra_ext.runtime.reporting import trace
from support import traces
from support.runtime.native import stack


@pytest.fixture
def run() -> Iterator[Run]:
    model = stack()
    with hydra_ext.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1MiB", checks=Checks(poison_hosts=True)
    ) as opened:
        yield opened


def evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(torch.ones(4, 64))


def test_a_path_that_cannot_be_written_is_refused_on_entering(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "step.json", tmp_path):
        with pytest.raises(TraceFileError, match="give run"), run.trace(path):
            pytest.fail("entered")
    with run.trace(tmp_path / "step.json"):
        evaluate(run)
    assert traces.read(tmp_path / "step.json").row("compute")


def test_a_second_trace_at_once_is_refused_and_leaves_the_first_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with run.trace(path):
        evaluate(run)
        with pytest.raises(StateError, match="already"), run.trace(path):
            pytest.fail("entered")
        evaluate(run)
    passes = traces.read(path).row("compute", "pass")
    assert [event["name"] for event in passes] == ["inference 1", "inference 2"]


def test_an_error_inside_leaves_what_there_is(run: Run, tmp_path: Path) -> None:
    def work() -> None:
        with run.trace(tmp_path / "step.json"):
            evaluate(run)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert [event["name"] for event in traces.read(tmp_path / "step.json").row("compute", "pass")] == ["inference 1"]
    assert not run.core.memory.backend.activity.recording


def test_a_disk_that_is_full_is_said_on_leaving_unless_there_is_an_error_already(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TraceFileError, match="No space left"), run.trace("/dev/full"):
        evaluate(run)
    with pytest.raises(ZeroDivisionError), run.trace("/dev/full"):
        raise ZeroDivisionError
    assert "No space left" in caplog.text
    assert not run.core.memory.backend.activity.recording


def test_a_trace_of_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    with hydra_ext.offload(stack(), budget="1MiB") as run:
        pass
    with pytest.raises(StateError, match="ended"):
        run.trace(tmp_path / "step.json")
    assert not (tmp_path / "step.json").exists()


def test_what_there_is_no_room_for_is_counted_and_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "_ROOM", 5)
    with run.trace(tmp_path / "step.json"):
        evaluate(run)
    file = traces.read(tmp_path / "step.json")
    assert len(file.events) == len(file.counters) == 5
    assert file.about["dropped_events"] > 0
    assert f"{file.about['dropped_events']} later ones" in caplog.text
