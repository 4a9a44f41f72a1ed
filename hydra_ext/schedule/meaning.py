"""Effects of a schedule on the numbers: late gradients, and whether a norm over all stages is possible."""

from __future__ import annotations

from hydra_ext.schedule import ActionKind, Schedule


def delay_of(schedule: Schedule) -> int:
    """Largest number of updates by which a schedule's gradients are late."""
    settled = schedule.stages + 1  # gradients of the first batches are late by less
    return max(settled - schedule.version_of(stage, settled) for stage in range(schedule.stages))


def meaning_of(delay: int) -> str:
    """The delay in words."""
    if delay == 0:
        return "the numbers of plain training"
    if delay == 1:
        uses = "each update uses gradients of the weights before the newest"
    else:
        uses = f"updates use gradients of weights that are up to {delay} updates old"
    return f"{uses}: approximate, not the numbers of plain training"


def norm_comes_in_time(schedule: Schedule) -> bool:
    """Whether every stage's gradients of a batch are complete by the step in which any stage is updated with them.

    Otherwise a rank would wait in one step for an action that another rank takes in a later one.
    """
    steps: dict[ActionKind, list[int]] = {ActionKind.REDUCE: [], ActionKind.UPDATE: []}
    for rank in range(schedule.ranks):
        for action in schedule.body(rank):
            if action.kind in steps:
                steps[action.kind].append(-action.batch)
    return max(steps[ActionKind.REDUCE], default=0) <= min(steps[ActionKind.UPDATE], default=0)
