"""Stages of a plain module, without tracing: every rank runs the user's own forward, and skips what is not its own."""

from hydra_ext.pipeline.split.blocks import find_blocks
from hydra_ext.pipeline.split.ownership import (
    buffer_owners,
    buffers_of,
    changed_elsewhere,
    glue_parameters,
    keep_own_part,
    parameters_of,
    shared_parameters,
)
from hydra_ext.pipeline.split.record import Rehearsal
from hydra_ext.pipeline.split.rehearse import rehearse
from hydra_ext.pipeline.split.stage import SplitPass, SplitStage
from hydra_ext.pipeline.split.stand_ins import is_absent
from hydra_ext.pipeline.split.timing import time_events

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
]
