"""What CMake decides about torch and CUDA, before anything is compiled: with torches that are made up, and no nvcc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def judged(tmp_path: Path) -> Callable[[str, str], tuple[bool, str]]:
    """Whether CMake takes this nvcc for that CUDA of torch, and what it says. Both are versions."""
    script = tmp_path / "judge.cmake"
    script.write_text(f"include({ROOT}/cmake/nvcc.cmake)\nhydra_expect_fitting_nvcc(${{NVCC}})\n")

    def judge(nvcc: str, torch_cuda: str) -> tuple[bool, str]:
        command = ["cmake", f"-DNVCC={nvcc}", f"-DTORCH_CUDA={torch_cuda}", "-P", script]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode == 0, re.sub(r"\s+", " ", done.stderr)

    return judge


@pytest.mark.parametrize(("nvcc", "torch_cuda"), [("13.1.80", "13.0"), ("12.10.1", "12.8")])
def test_an_nvcc_that_is_newer_than_torchs_runtime_is_warned_of(
    judged: Callable[[str, str], tuple[bool, str]], nvcc: str, torch_cuda: str
) -> None:
    content, text = judged(nvcc, torch_cuda)
    assert content
    assert "CMake Warning" in text
    assert f"torch loads the runtime of CUDA {torch_cuda}, but nvcc is {nvcc}, which is newer" in text
    assert f"with an undefined symbol. Then install nvcc of CUDA {torch_cuda}, or an older one of CUDA" in text


@pytest.mark.parametrize(("nvcc", "torch_cuda"), [("13.0.88", "13.0"), ("13.0.88", "13.1"), ("12.8.93", "12.10")])
def test_an_nvcc_that_is_not_newer_is_taken(
    judged: Callable[[str, str], tuple[bool, str]], nvcc: str, torch_cuda: str
) -> None:
    assert judged(nvcc, torch_cuda) == (True, "")


def test_an_nvcc_of_another_major_version_is_refused(judged: Callable[[str, str], tuple[bool, str]]) -> None:
    content, text = judged("12.8.93", "13.0")
    assert not content
    assert "torch was built with CUDA 13.0, but nvcc is 12.8.93: install nvcc of CUDA 13" in text


def test_a_torch_that_is_hidden_says_how_to_show_it(tmp_path: Path, without_nvcc: Path) -> None:
    content, text = configure(tmp_path, without_nvcc, "raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    assert not content
    assert "which pip hides from the build" in text
    assert "pip install --no-build-isolation ." in text
