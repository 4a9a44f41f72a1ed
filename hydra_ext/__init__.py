"""Train models bigger than the GPU."""

import sys

from hydra_ext import _guard

if (_problem := _guard.load_extension()) is not None:
    if not _guard.doctor_was_asked_for():
        raise ImportError(_problem)
    from hydra_ext.cli import main

    sys.exit(main.run(sys.argv[1:]))

from hydra_ext import _build_info, optim, schedule
from hydra_ext.construction import materialize
from hydra_ext.offload import offload
from hydra_ext.pipeline import Pipeline, PipelineOutput
from hydra_ext.policy import Checks, SimulatedDevice
from hydra_ext.runtime.figures import StepFigures
from hydra_ext.runtime.report import Report
from hydra_ext.runtime.rounds.step import StepOutput
from hydra_ext.runtime.run import Run

# ---- public names: re-exports only, at most 15 -----------------------------------------------------------------------
__all__ = [
    "Checks",
    "Pipeline",
    "PipelineOutput",
    "Report",
    "Run",
    "SimulatedDevice",
    "StepFigures",
    "StepOutput",
    "__version__",
    "materialize",
    "offload",
    "optim",
    "schedule",
]

__version__ = _build_info.VERSION
