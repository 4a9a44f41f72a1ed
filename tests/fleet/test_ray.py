"""Fleets on a Ray cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_ext.errors import MissingDependency
from hydra_ext.fleet import Fleet
from support.fleet import trainings


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths may have 107 bytes."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def told_by(module: str, short_folder: str, *arguments: object) -> Any:
    """What a program of its own prints last."""
    places = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": places, "RAY_TMPDIR": short_folder, "TMPDIR": short_folder}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_node_is_killed_in_the_middle(tmp_path: Path, short_folder: str) -> None:
    """Its job goes on elsewhere, and all jobs end with the numbers of each alone."""
    told = told_by("support.fleet.ray_program", short_folder, tmp_path / "fleet", 2)
    failures = [failure for _, failure in told["stretches"]]
    assert "its node or its host process went away" in failures
    assert len({node for node, _ in told["stretches"]}) == 3


def test_a_job_runs_on_a_node_of_a_cluster(tmp_path: Path, short_folder: str) -> None:
    told = told_by("support.fleet.ray_program", short_folder, tmp_path / "fleet", 0)
    assert [failure for _, failure in told["stretches"]] == [None]
    assert "has the resource 'GPU': start nodes with GPUs" in told["refused"]


@pytest.mark.full
def test_two_jobs_share_a_device_of_a_cluster(tmp_path: Path, short_folder: str) -> None:
    told = told_by("support.fleet.ray_program", short_folder, tmp_path / "fleet", 0, "shared")
    assert told["packs"] == [["compute", "link"]]
    assert [failure for _, failure in told["stretches"]] == [None, None]


@pytest.mark.full
def test_a_job_is_a_trainable_of_ray_tune(tmp_path: Path, short_folder: str) -> None:
    told = told_by("support.fleet.tune_program", short_folder, tmp_path)
    assert told["kept"] == [True, True]
    for rate, loss, evaluation in told["first"]:
        _, losses, evaluated = trainings.plainly(trainings.job("a", lr=rate, steps=6), threads=1)
        assert (loss, evaluation) == (losses[-1], evaluated)


def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'hydra-ext\[ray\]'"):
        Fleet(tmp_path, address="auto").run([trainings.job("a")])
