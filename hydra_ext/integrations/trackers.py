"""Trackers for a fleet, as ``fleet.run(jobs, trackers=[...])`` takes them: TensorBoard and MLflow.

Other libraries need no adapter here: an object with the methods of :class:`hydra_ext.fleet.Tracker` is one.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from hydra_ext.errors import MissingDependency


class TensorBoard:
    """Writes event files for TensorBoard, in a folder for each job.

    Args:
        folder: For ``tensorboard --logdir``.

    Raises:
        MissingDependency: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._make = _imported("torch.utils.tensorboard", "TensorBoard()", "tensorboard").SummaryWriter
        self._writers: dict[str, Any] = {}

    def job_step(self, job: str, step: int, loss: float, seconds: float) -> None:
        writer = self._writer(job)
        writer.add_scalar("loss", loss, step)
        writer.add_scalar("seconds a step", seconds, step)

    def job_ended(self, job: str, *, is_done: bool, evaluation: float | None) -> None:
        if evaluation is not None:
            self._writer(job).add_scalar("evaluation", evaluation)
        if job in self._writers:
            self._writers.pop(job).close()

    def close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def _writer(self, job: str) -> Any:
        if job not in self._writers:
            self._writers[job] = self._make(str(self._folder / job))
        return self._writers[job]


class MLflow:
    """Logs to an MLflow server, a run for each job. A fleet that resumes goes on with the runs that it had.

    Args:
        uri: Of the tracking server, or of a folder as ``file:...``.
        experiment: Name of the experiment; made if it is new.

    Raises:
        MissingDependency: mlflow is not installed.
    """

    def __init__(self, uri: str, *, experiment: str = "fleet") -> None:
        mlflow = _imported("mlflow", "MLflow()", "mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._runs: dict[str, str] = {}

    def job_step(self, job: str, step: int, loss: float, seconds: float) -> None:
        run = self._run(job)
        self._client.log_metric(run, "loss", loss, step=step)
        self._client.log_metric(run, "step_seconds", seconds, step=step)

    def job_ended(self, job: str, *, is_done: bool, evaluation: float | None) -> None:
        run = self._run(job)
        if evaluation is not None:
            self._client.log_metric(run, "evaluation", evaluation)
        self._client.set_terminated(run, status="FINISHED" if is_done else "FAILED")

    def close(self) -> None:
        """Runs of jobs that are left stay open, for a fleet that resumes."""

    def _run(self, job: str) -> str:
        if job not in self._runs:
            found = self._client.search_runs([self._experiment], f"attributes.run_name = '{job}'", max_results=1)
            run = found[0] if found else self._client.create_run(self._experiment, run_name=job)
            self._runs[job] = run.info.run_id
        return self._runs[job]


def _imported(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(f"{what} needs {package}, which is not installed: pip install {package}") from error
