"""Trains one model over many ranks: stages, versions of weights, and schedules that run over torch.distributed."""

from hydra_ext.pipeline.output import PipelineOutput
from hydra_ext.pipeline.pipeline import Pipeline
from hydra_ext.pipeline.report import PipelineReport

__all__ = ["Pipeline", "PipelineOutput", "PipelineReport"]
