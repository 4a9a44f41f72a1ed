"""Trackers: what they are told, what becomes of one that raises, and the adapters to other libraries."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from hydra_ext.errors import MissingDependency
from hydra_ext.fleet.tracking import Told
from hydra_ext.integrations import trackers
from support.fleet_folders import Recorder

STEP = {"event": "step", "step": 3, "loss": 0.5, "seconds": 0.25}


def test_trackers_hear_steps_and_ends_and_nothing_else() -> None:
    recorder = Recorder()
    told = Told([recorder])
    for record in (
        {"event": "opened", "step": 2},
        STEP,
        {"event": "saved", "step": 3},
        {"event": "done", "step": 3, "evaluation": 0.75},
    ):
        told.hear("a", record)
    told.job_ended("b", is_done=False, evaluation=None)
    told.close()
    assert recorder.heard == [
        ("step", "a", 3, 0.5, 0.25),
        ("ended", "a", True, 0.75),
        ("ended", "b", False, None),
        ("close",),
    ]


def test_a_tracker_that_raises_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(Recorder):
        def job_step(self, job: str, step: int, loss: float, seconds: float) -> None:
            super().job_step(job, step, loss, seconds)
            raise OSError("the server is away")

    raising, other = Raising(), Recorder()
    told = Told([raising, other])
    with caplog.at_level(logging.WARNING):
        told.hear("a", STEP)
        told.hear("a", STEP)
        told.close()
    assert raising.heard == [("step", "a", 3, 0.5, 0.25)]
    assert other.heard == [("step", "a", 3, 0.5, 0.25)] * 2 + [("close",)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{raising!r} is left out from now on: job_step() has failed"
    ]
    assert "the server is away" in caplog.text


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("module", "make", "package"),
    [
        ("torch.utils.tensorboard", lambda: trackers.TensorBoard("folder"), "tensorboard"),
        ("mlflow", lambda: trackers.MLflow("file:folder"), "mlflow"),
    ],
)
def test_a_library_that_is_missing_is_named(
    module: str, make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=f"needs {package}, which is not installed: pip install {package}"):
        make()


class Writer(Recorder):
    """In place of ``torch.utils.tensorboard.SummaryWriter``."""

    made: ClassVar[dict[str, Writer]] = {}

    def __init__(self, folder: str) -> None:
        super().__init__()
        assert folder not in Writer.made, "a job has one writer"
        Writer.made[folder] = self

    def add_scalar(self, tag: str, value: float, step: int | None = None) -> None:
        self.heard.append((tag, value, step))


def test_tensorboard_has_a_folder_for_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "made", {})
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = trackers.TensorBoard(tmp_path)
    board.job_step("a", 1, 0.5, 0.25)
    board.job_step("b", 1, 1.5, 1.25)
    board.job_step("a", 2, 0.375, 0.25)
    board.job_ended("a", is_done=True, evaluation=0.125)
    board.job_ended("never begun", is_done=False, evaluation=None)
    board.close()
    assert {folder: writer.heard for folder, writer in Writer.made.items()} == {
        str(tmp_path / "a"): [
            ("loss", 0.5, 1),
            ("seconds a step", 0.25, 1),
            ("loss", 0.375, 2),
            ("seconds a step", 0.25, 2),
            ("evaluation", 0.125, None),
            ("close",),
        ],
        str(tmp_path / "b"): [("loss", 1.5, 1), ("seconds a step", 1.25, 1), ("close",)],
    }


class Client:
    """In place of ``mlflow.MlflowClient``, over one server's state."""

    experiments: ClassVar[dict[str, str]] = {}
    runs: ClassVar[dict[str, list[tuple[Any, ...]]]] = {}

    def __init__(self, tracking_uri: str) -> None:
        assert tracking_uri == "file:folder"

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.experiments
        self.experiments[name] = f"id of {name}"
        return self.experiments[name]

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        assert experiments == ["id of sweep"]
        return [self._run(name) for name in self.runs if filter_string == f"attributes.run_name = '{name}'"]

    def create_run(self, experiment: str, run_name: str) -> Any:
        assert run_name not in self.runs
        self.runs[run_name] = []
        return self._run(run_name)

    def log_metric(self, run: str, key: str, value: float, step: int | None = None) -> None:
        self.runs[run].append((key, value, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].append((status,))

    def _run(self, name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=name))


def test_mlflow_has_a_run_for_each_job_also_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "experiments", {})
    monkeypatch.setattr(Client, "runs", {})
    module = ModuleType("mlflow")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    first = trackers.MLflow("file:folder", experiment="sweep")
    first.job_step("a", 1, 0.5, 0.25)
    first.job_ended("b", is_done=False, evaluation=None)
    first.close()
    second = trackers.MLflow("file:folder", experiment="sweep")
    second.job_step("a", 2, 0.375, 0.25)
    second.job_ended("a", is_done=True, evaluation=0.125)
    assert Client.runs == {
        "a": [
            ("loss", 0.5, 1),
            ("step_seconds", 0.25, 1),
            ("loss", 0.375, 2),
            ("step_seconds", 0.25, 2),
            ("evaluation", 0.125, None),
            ("FINISHED",),
        ],
        "b": [("FAILED",)],
    }
