"""Refuses schedules that update a weight before the ranks that train it have added up its gradients."""

from __future__ import annotations

from collections.abc import Iterable

from hydra_ext.errors import UnsupportedModel
from hydra_ext.schedule import Schedule
from hydra_ext.schedule.meaning import norm_comes_in_time


def refuse_late_sums(weights: Iterable[tuple[str, Iterable[int]]], schedule: Schedule) -> None:
    """Refuses weights on several ranks whose sums of gradients this schedule would wait for too early.

    An update would wait in one step for a gradient that another rank has some steps later. That rank would wait for
    this step's loss, if it is read.

    Args:
        weights: Description of each weight, with the stages that train it.
        schedule: Schedule of the pipeline.

    Raises:
        UnsupportedModel: The schedule updates a stage before all stages have the batch's gradients.
    """
    if norm_comes_in_time(schedule):
        return
    for name, stages in weights:
        if len({schedule.stage_rank(stage) for stage in stages}) > 1:
            raise UnsupportedModel(
                f"{name} is trained by stages {sorted(stages)}, which are on several ranks, and this schedule updates "
                "a stage before all stages have the batch's gradients, so that there is no sum of them yet: use "
                "schedule='2bw', or give each stage a weight of its own"
            )
