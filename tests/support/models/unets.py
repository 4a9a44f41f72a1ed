"""The networks of examples/gigapixel_unet.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).parents[3] / "examples" / "gigapixel_unet.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gigapixel_unet", EXAMPLE)
    if spec is None or spec.loader is None:
        raise ImportError(f"{EXAMPLE} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _load()
