"""Stages of a plain module, without tracing: every rank runs the user's own forward and skips other ranks' blocks."""

from hydra_ext.split.blocks import find_blocks
from hydra_ext.split.rehearsal.record import Rehearsal
from hydra_ext.split.rehearsal.rehearse import rehearse
from hydra_ext.split.rehearsal.timing import time_events, time_microbatch, time_stage
from hydra_ext.split.stages.ownership import (
    buffer_owners,
    buffers_of,
    changed_elsewhere,
    glue_parameters,
    keep_own_part,
    parameters_of,
    shared_parameters,
)
from hydra_ext.split.stages.stage import SplitPass, SplitStage
from hydra_ext.split.stages.stand_ins import is_absent

__all__ = [
    "Rehearsal",
    "SplitPass",
    "SplitStage",
    "buffer_owners",
    "buffers_of",
    "changed_elsewhere",
    "find_blocks",
    "glue_parameters",
    "is_absent",
    "keep_own_part",
    "parameters_of",
    "rehearse",
    "shared_parameters",
    "time_events",
    "time_microbatch",
    "time_stage",
]
