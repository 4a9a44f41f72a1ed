"""The guard: which builds are refused on which torch, and what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

import hydra_ext
from hydra_ext import _build_info, _guard
from hydra_ext._guard import Build, Torch
from support.stamped import PYTHON, copy_for

CPU_BUILD = Build(torch="2.13", torch_cuda="", cuda="OFF")
CUDA_BUILD = Build(torch="2.13", torch_cuda="13.0", cuda="ON")


@pytest.mark.parametrize(
    ("build", "torch"),
    [
        (CPU_BUILD, Torch("2.13.0+cpu", "")),
        (CPU_BUILD, Torch("2.13.1", "")),
        (CUDA_BUILD, Torch("2.13.0+cu130", "13.0")),
        (CUDA_BUILD, Torch("2.13.0+cu132", "13.2")),
    ],
)
def test_a_build_runs_on_the_torch_it_was_made_for(build: Build, torch: Torch) -> None:
    assert _guard.mismatch(build, torch) is None


@pytest.mark.parametrize(
    ("build", "torch", "built", "there"),
    [
        (CPU_BUILD, Torch("2.12.1+cpu", ""), "torch 2.13", "torch 2.12.1+cpu"),
        (CPU_BUILD, Torch("3.13.0", ""), "torch 2.13", "torch 3.13.0"),
        (CPU_BUILD, Torch("2.13.0+cu130", "13.0"), "no CUDA", "CUDA 13.0"),
        (CUDA_BUILD, Torch("2.13.0+cpu", ""), "CUDA 13.0", "no CUDA"),
        (CUDA_BUILD, Torch("2.13.0+cu128", "12.8"), "CUDA 13.0", "CUDA 12.8"),
    ],
)
def test_a_mismatch_names_both_sides_and_the_remedy(build: Build, torch: Torch, built: str, there: str) -> None:
    text = _guard.mismatch(build, torch)
    assert text is not None
    before, after = text.split(", but ")
    assert built in before
    assert there in after
    assert _guard.REBUILD in after


def test_the_installed_build_fits_the_installed_torch() -> None:
    assert _guard.load_extension() is None
    assert hydra_ext.__version__ == _build_info.VERSION


def test_a_missing_build_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "read_build", lambda: None)
    text = _guard.load_extension()
    assert text is not None
    assert "holds no build" in text


def test_a_missing_torch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "installed_torch", lambda: None)
    text = _guard.load_extension()
    assert text is not None
    assert "pip install" in text


def test_an_extension_that_cannot_be_loaded_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra_ext._C", None)
    text = _guard.load_extension()
    assert text is not None
    assert "cannot be loaded" in text


def test_import_raises_one_import_error_and_leaves_the_extension_alone(tmp_path: Path) -> None:
    """A copy of the package with another stamp: `_C` must not be imported by then."""
    environment = copy_for("1.0", tmp_path)
    next((tmp_path / "hydra_ext").glob("_C.*.so")).unlink()
    (tmp_path / "hydra_ext" / "_C.py").write_text("raise SystemExit('_C was imported')\n")

    run = subprocess.run([*PYTHON, "-c", "import hydra_ext"], env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("ImportError: hydra_ext was built against torch 1.0, but")
