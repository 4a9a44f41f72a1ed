"""Planners, which decide before a run: where a model is cut, and what a step keeps, moves and computes again.

All but :func:`fit` and :func:`pipeline` see numbers only: no tensors, no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra_ext.plan.chain import Boundary, Event, Partition, SharedParameters, Stage, partition_chain
    from hydra_ext.plan.kinds import solve
    from hydra_ext.plan.pipelines.crossover import Crossover, CrossoverPoint, crossover
    from hydra_ext.plan.pipelines.forecast import PipelineAlternative, PipelinePlan, PlannedStage
    from hydra_ext.plan.pipelines.planning import pipeline
    from hydra_ext.plan.pipelines.question import PipelineChoice
    from hydra_ext.plan.solution import Solution
    from hydra_ext.plan.steps.fitting import fit
    from hydra_ext.plan.steps.forecast import Advice, MeasuredStep, Plan, PlannedSegment
    from hydra_ext.plan.steps.memory import MemoryPoint
    from hydra_ext.plan.steps.timeline import LaneInterval, StepTimeline
    from hydra_ext.profile.cards import CARDS, Card

__all__ = [
    "CARDS",
    "Advice",
    "Boundary",
    "Card",
    "Crossover",
    "CrossoverPoint",
    "Event",
    "LaneInterval",
    "MeasuredStep",
    "MemoryPoint",
    "Partition",
    "PipelineAlternative",
    "PipelineChoice",
    "PipelinePlan",
    "Plan",
    "PlannedSegment",
    "PlannedStage",
    "SharedParameters",
    "Solution",
    "Stage",
    "StepTimeline",
    "crossover",
    "fit",
    "partition_chain",
    "pipeline",
    "solve",
]

_ON_FIRST_USE = {  # a run imports one planner
    "Advice": "hydra_ext.plan.steps.forecast",
    "Boundary": "hydra_ext.plan.chain",
    "CARDS": "hydra_ext.profile.cards",
    "Card": "hydra_ext.profile.cards",
    "Crossover": "hydra_ext.plan.pipelines.crossover",
    "CrossoverPoint": "hydra_ext.plan.pipelines.crossover",
    "Event": "hydra_ext.plan.chain",
    "LaneInterval": "hydra_ext.plan.steps.timeline",
    "MeasuredStep": "hydra_ext.plan.steps.forecast",
    "MemoryPoint": "hydra_ext.plan.steps.memory",
    "Partition": "hydra_ext.plan.chain",
    "PipelineAlternative": "hydra_ext.plan.pipelines.forecast",
    "PipelineChoice": "hydra_ext.plan.pipelines.question",
    "PipelinePlan": "hydra_ext.plan.pipelines.forecast",
    "Plan": "hydra_ext.plan.steps.forecast",
    "PlannedSegment": "hydra_ext.plan.steps.forecast",
    "PlannedStage": "hydra_ext.plan.pipelines.forecast",
    "SharedParameters": "hydra_ext.plan.chain",
    "Solution": "hydra_ext.plan.solution",
    "Stage": "hydra_ext.plan.chain",
    "StepTimeline": "hydra_ext.plan.steps.timeline",
    "crossover": "hydra_ext.plan.pipelines.crossover",
    "fit": "hydra_ext.plan.steps.fitting",
    "partition_chain": "hydra_ext.plan.chain",
    "pipeline": "hydra_ext.plan.pipelines.planning",
    "solve": "hydra_ext.plan.kinds",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'hydra_ext.plan' has no attribute '{name}'")
    return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
