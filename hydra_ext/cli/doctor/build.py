"""The versions, the build, and whether they fit each other."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from importlib import import_module, metadata

from hydra_ext import _guard
from hydra_ext.cli.doctor.report import Check, Facts, Status


@dataclass(frozen=True)
class BuildFacts:
    """Facts about the build. `problem` says why `_C` does not run here; None if it does."""

    hydra_ext: str | None
    python: str
    torch: str | None
    torch_cuda: str
    platform: str
    built_for_torch: str | None
    built_for_torch_cuda: str
    built_cuda: str | None
    without_cuda: str
    fault_key: str | None
    compiler: str | None
    extension: str | None
    problem: str | None


def collect() -> BuildFacts:
    problem = _guard.load_extension()
    torch = _guard.installed_torch()
    stamp = _stamp()
    extension = sys.modules.get("hydra_ext._C")
    return BuildFacts(
        hydra_ext=stamp.get("VERSION") or _distribution_version(),
        python=platform.python_version(),
        torch=torch.version if torch else None,
        torch_cuda=torch.cuda if torch else "",
        platform=platform.platform(),
        built_for_torch=stamp.get("TORCH"),
        built_for_torch_cuda=stamp.get("TORCH_CUDA", ""),
        built_cuda=stamp.get("CUDA"),
        without_cuda=stamp.get("WITHOUT_CUDA", ""),
        fault_key=stamp.get("FAULT_KEY"),
        compiler=stamp.get("COMPILER"),
        extension=getattr(extension, "__file__", None),
        problem=problem,
    )


def section(facts: BuildFacts) -> Facts:
    return asdict(facts)


def checks(facts: BuildFacts) -> list[Check]:
    if facts.problem is not None:
        return [Check("extension", Status.FAIL, facts.problem, _guard.REBUILD)]
    found = [Check("extension", Status.OK, f"built for torch {facts.built_for_torch}, runs on {facts.torch}")]
    if facts.built_for_torch_cuda and facts.without_cuda:
        detail = f"torch has CUDA, hydra_ext has no kernels for it: {facts.without_cuda}"
        found.append(Check("CUDA kernels", Status.WARN, detail, _guard.how_to_get_cuda()))
    return found


def _stamp() -> dict[str, str]:
    try:
        info = import_module("hydra_ext._build_info")
    except ModuleNotFoundError:
        return {}
    return {name: value for name, value in vars(info).items() if name.isupper()}


def _distribution_version() -> str | None:
    try:
        return metadata.version("hydra-ext")
    except metadata.PackageNotFoundError:
        return None
