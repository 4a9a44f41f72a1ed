"""Labels of microbatches in pictures."""

from __future__ import annotations

from hydra_ext import _C
from hydra_ext._C import Action, ActionKind, TimedAction

WORK = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.UPDATE)
"""Actions that occupy a rank; the begin of an update does not."""


def label(core: _C.Schedule, action: Action) -> str:
    """The microbatch's number, counted through all batches; "U" for an update.

    If the rank has several stages, a letter for the stage follows.
    """
    stages = core.stages_of(core.rank_of(action.stage))
    letter = chr(ord("a") + stages.index(action.stage) % 26) if len(stages) > 1 else ""
    if action.kind == ActionKind.UPDATE:
        return "U" + letter
    return f"{action.batch * core.microbatches + action.microbatch}{letter}"


def work_by_rank(core: _C.Schedule, timeline: _C.Timeline) -> list[list[TimedAction]]:
    """Actions that occupy each rank for some time, in order."""
    ranks: list[list[TimedAction]] = [[] for _ in range(core.ranks)]
    for timed in timeline.actions:
        if timed.action.kind in WORK and timed.end > timed.start:
            ranks[timed.rank].append(timed)
    return ranks


def shortest(ranks: list[list[TimedAction]]) -> float:
    """Seconds of the shortest forward or backward; 1 if there is none."""
    durations = [t.end - t.start for rank in ranks for t in rank if t.action.kind != ActionKind.UPDATE]
    return min(durations, default=1.0)
