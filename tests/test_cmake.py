"""What CMake decides about torch and CUDA, before anything is compiled: with torches that are made up, and no nvcc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def without_nvcc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All programs of this machine but nvcc."""
    folder = tmp_path_factory.mktemp("bin")
    for place in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
        for program in os.scandir(place):
            if program.name != "nvcc" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(Path(place, program.name))
    return folder


def configure(folder: Path, programs: Path, torch: str, *options: str) -> tuple[bool, str]:
    """Whether CMake is content, and what it says, on one line. `torch` is the text of a module."""
    modules = folder / "modules" / "torch"
    modules.mkdir(parents=True)
    (modules / "__init__.py").write_text(torch)
    (modules / "version.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "CUDACXX"}
    done = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder / "build", f"-DPython_EXECUTABLE={sys.executable}", *options],
        env={**environment, "PATH": str(programs), "PYTHONPATH": str(modules.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode == 0, re.sub(r"\s+", " ", done.stdout)


WITH_CUDA = "__version__ = '2.13.0+cu130'\nclass version: cuda = '13.0'\n"


def test_a_torch_with_cuda_and_no_nvcc_gives_a_build_without_kernels(tmp_path: Path, without_nvcc: Path) -> None:
    content, text = configure(tmp_path, without_nvcc, WITH_CUDA)
    assert content, text
    assert "CMake Warning" in text
    assert "built without CUDA kernels" in text
    assert "install nvcc of CUDA 13" in text
    stamp = (tmp_path / "build" / "_build_info.py").read_text()
    assert 'CUDA = "OFF"\nWITHOUT_CUDA = "no nvcc was found that works"\n' in stamp
    assert 'TORCH_CUDA = "13.0"\n' in stamp


def test_cuda_that_was_asked_for_needs_nvcc(tmp_path: Path, without_nvcc: Path) -> None:
    content, text = configure(tmp_path, without_nvcc, WITH_CUDA, "-DHYDRA_CUDA=ON")
    assert not content
    assert "HYDRA_CUDA=ON, but no nvcc was found that works: install nvcc of CUDA 13" in text


def test_a_torch_that_is_hidden_says_how_to_show_it(tmp_path: Path, without_nvcc: Path) -> None:
    content, text = configure(tmp_path, without_nvcc, "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    assert not content
    assert "which pip hides from the build" in text
    assert "pip install --no-build-isolation ." in text
