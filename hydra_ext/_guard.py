"""Checks that `_C` was built for the torch that is installed, before `_C` is imported.

A `_C` built on another minor version of torch may import, return garbage and crash later. The guard compares the
build stamp that CMake wrote (`_build_info`) with the installed torch. A mismatch becomes one text, which names the
build, the installed torch and the command to run.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_WHERE = f"run `{REBUILD}` in hydra_ext's source folder"


@dataclass(frozen=True)
class Build:
    """The torch and CUDA versions that a build was made for, from its stamp."""

    torch: str
    torch_cuda: str
    cuda: str


@dataclass(frozen=True)
class Torch:
    """The installed torch. `cuda` is empty if torch was built without CUDA."""

    version: str
    cuda: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def mismatch(build: Build, torch: Torch) -> str | None:
    """Why this build cannot run on this torch, or None."""
    if build.torch != torch.minor:
        return (
            f"hydra_ext was built against torch {build.torch}, but torch {torch.version} is installed: "
            f"{_WHERE}, or install torch {build.torch}"
        )
    if _cuda_kind(build.torch_cuda) != _cuda_kind(torch.cuda):
        return (
            f"hydra_ext was built against a torch with {_cuda_name(build.torch_cuda)} (HYDRA_CUDA={build.cuda}), but "
            f"torch {torch.version} with {_cuda_name(torch.cuda)} is installed: {_WHERE}"
        )
    return None


def _cuda_kind(version: str) -> str:
    """The major version: builds for the same one work together."""
    return version.split(".")[0]


def _cuda_name(version: str) -> str:
    return f"CUDA {version}" if version else "no CUDA"


def how_to_get_cuda() -> str:
    """Says how to get CUDA kernels, for a build that has none."""
    info = importlib.import_module("hydra_ext._build_info")
    if not info.TORCH_CUDA:
        return f"install a torch with CUDA, then {_WHERE}"
    if "HYDRA_CUDA=" in info.WITHOUT_CUDA:
        return f"unset HYDRA_CUDA, then {_WHERE}"
    return f"install nvcc of CUDA {_cuda_kind(info.TORCH_CUDA)}, on PATH or named by CUDACXX, then {_WHERE}"


def installed_torch() -> Torch | None:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return Torch(torch.__version__, torch.version.cuda or "")


def read_build() -> Build | None:
    """The stamp, or None if hydra_ext was not built, as in its source folder."""
    try:
        info = importlib.import_module("hydra_ext._build_info")
    except ModuleNotFoundError:
        return None
    return Build(info.TORCH, info.TORCH_CUDA, info.CUDA)


def load_extension() -> str | None:
    """Imports `_C` if it fits this torch, otherwise returns the reason. torch is imported first in any case."""
    torch = installed_torch()
    if torch is None:
        return 'hydra_ext needs torch, which is not installed: run `pip install "torch>=2.11,<2.14"`, then rebuild'
    build = read_build()
    if build is None:
        folder = Path(__file__).parent
        return (
            f"hydra_ext was imported from {folder}, which holds no build: start Python in another folder, or {_WHERE}"
        )
    problem = mismatch(build, torch)
    if problem is not None:
        return problem
    try:
        importlib.import_module("hydra_ext._C")
    except ImportError as error:
        return f"hydra_ext._C, built against torch {build.torch}, cannot be loaded ({error}): {_WHERE}"
    return None


def doctor_was_asked_for() -> bool:
    """Whether `hydra-ext doctor` or `python -m hydra_ext doctor` imports this, which has to work on a broken build too.

    To locate the module of `-m` Python imports its package. `sys.argv[0]` is "-m" meanwhile.
    """
    module = sys.argv[0] == "-m" and "hydra_ext" in sys.orig_argv
    return sys.argv[1:2] == ["doctor"] and (module or Path(sys.argv[0]).name == "hydra-ext")
