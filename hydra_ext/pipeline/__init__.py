"""One model over many ranks: stages, versions of weights, schedules run over torch.distributed."""

from hydra_ext.pipeline.output import PipelineOutput
from hydra_ext.pipeline.pipeline import Pipeline

__all__ = ["Pipeline", "PipelineOutput"]
