"""A copy of the package stamped for another torch, and a Python that imports it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import hydra_ext
from hydra_ext import _C, _build_info

# Without `site`, because an editable install goes before any path.
PYTHON = [sys.executable, "-S", "-W", "ignore"]


def copy_for(torch: str, folder: Path) -> dict[str, str]:
    """Returns the environment in which PYTHON imports a copy in `folder`, stamped for this minor version of torch."""
    copy = folder / "hydra_ext"
    shutil.copytree(Path(hydra_ext.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_C.__file__, copy)
    stamp = Path(_build_info.__file__).read_text().replace(f'TORCH = "{_build_info.TORCH}"', f'TORCH = "{torch}"')
    (copy / "_build_info.py").write_text(stamp)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
