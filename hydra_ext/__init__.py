"""Train models bigger than the GPU."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hydra_ext import _guard

if (_problem := _guard.load_extension()) is not None:
    if not _guard.doctor_was_asked_for():
        raise ImportError(_problem)
    from hydra_ext.cli import main

    sys.exit(main.run(sys.argv[1:]))

from hydra_ext import _build_info, errors, optim
from hydra_ext.offload import offload
from hydra_ext.policy import Auto, Checks, Compress, Keep, Offload, Recompute, SimulatedDevice
from hydra_ext.runtime.reporting.report import Report
from hydra_ext.runtime.run import Run
from hydra_ext.stash import stash

if TYPE_CHECKING:
    from hydra_ext import codec, data, fleet, plan, schedule, tiled
    from hydra_ext.checkpoint.loading import Loaded, load_model
    from hydra_ext.construction import materialize
    from hydra_ext.fleet import Fleet, Job
    from hydra_ext.integrations.pretrained import from_pretrained
    from hydra_ext.pipeline import Pipeline, PipelineOutput, PipelineReport
    from hydra_ext.runtime.placement.reading_ahead import read_ahead
    from hydra_ext.runtime.placement.sharing import SharedDevice, SharedReport
    from hydra_ext.runtime.reporting.figures import StepFigures
    from hydra_ext.runtime.rounds.step import StepOutput

__all__ = [
    "Auto",
    "Checks",
    "Compress",
    "Fleet",
    "Job",
    "Keep",
    "Loaded",
    "Offload",
    "Pipeline",
    "PipelineOutput",
    "PipelineReport",
    "Recompute",
    "Report",
    "Run",
    "SharedDevice",
    "SharedReport",
    "SimulatedDevice",
    "StepFigures",
    "StepOutput",
    "__version__",
    "codec",
    "data",
    "errors",
    "fleet",
    "from_pretrained",
    "load_model",
    "materialize",
    "offload",
    "optim",
    "plan",
    "read_ahead",
    "schedule",
    "stash",
    "tiled",
]

__version__ = _build_info.VERSION

_ON_FIRST_USE = {  # imported on first use, to keep `import hydra_ext` fast
    "Fleet": "hydra_ext.fleet",
    "Job": "hydra_ext.fleet",
    "Loaded": "hydra_ext.checkpoint.loading",
    "Pipeline": "hydra_ext.pipeline",
    "PipelineOutput": "hydra_ext.pipeline",
    "PipelineReport": "hydra_ext.pipeline",
    "SharedDevice": "hydra_ext.runtime.placement.sharing",
    "SharedReport": "hydra_ext.runtime.placement.sharing",
    "from_pretrained": "hydra_ext.integrations.pretrained",
    "load_model": "hydra_ext.checkpoint.loading",
    "StepFigures": "hydra_ext.runtime.reporting.figures",
    "StepOutput": "hydra_ext.runtime.rounds.step",
    "materialize": "hydra_ext.construction",
    "read_ahead": "hydra_ext.runtime.placement.reading_ahead",
}


def __getattr__(name: str) -> Any:
    if name in ("codec", "data", "fleet", "plan", "schedule", "tiled"):
        return importlib.import_module(f"hydra_ext.{name}")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'hydra_ext' has no attribute '{name}'")
    return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)


def __dir__() -> list[str]:
    """Also what is imported on first use."""
    return sorted({*globals(), *__all__})
