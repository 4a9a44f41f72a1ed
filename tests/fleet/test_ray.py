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

import pytest

from hydra_ext.errors import MissingDependency
from hydra_ext.fleet import Fleet


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths may have 107 bytes."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_node_is_killed_in_the_middle(tmp_path: Path, short_folder: str) -> None:
    """Its job goes on elsewhere, and all jobs end with the numbers of each alone."""
    places = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": places, "RAY_TMPDIR": short_folder, "TMPDIR": short_folder}
    done = subprocess.run(
        [sys.executable, "-m", "support.fleet.ray_program", str(tmp_path / "fleet")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    failures = [failure for _, failure in told["stretches"]]
    assert failures.count("its node or its host process went away") == 1
    assert len({node for node, _ in told["stretches"]}) == 3
    assert "has the resource 'GPU': start nodes with GPUs" in told["refused"]


def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'hydra-ext\[ray\]'"):
        Fleet(tmp_path, address="auto").run([])
