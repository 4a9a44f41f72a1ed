"""How pictures name a microbatch."""

from __future__ import annotations

from hydra_ext import _C
from hydra_ext._C import Action, ActionKind, TimedAction

WORK = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.UPDATE)
"""What holds a rank: the begin of an update does not."""


def label(core: _C.Schedule, action: Action) -> str:
    """The microbatch counted through all batches; behind it a letter for which of its rank's stages it is on, where
    there are several. "U" for an update."""
    stages = core.stages_of(core.rank_of(action.stage))
    letter = chr(ord("a") + stages.index(action.stage) % 26) if len(stages) > 1 else ""
    if action.kind == ActionKind.UPDATE:
        return "U" + letter
    return f"{action.batch * core.microbatches + action.microbatch}{letter}"


def work_by_rank(core: _C.Schedule, timeline: _C.Timeline) -> list[list[TimedAction]]:
    """What lasts and holds each rank, in its order."""
    ranks: list[list[TimedAction]] = [[] for _ in range(core.ranks)]
    for timed in timeline.actions:
        if timed.action.kind in WORK and timed.end > timed.start:
            ranks[timed.rank].append(timed)
    return ranks


def shortest(ranks: list[list[TimedAction]]) -> float:
    """Seconds of the shortest forward or backward; 1 where none lasts."""
    durations = [t.end - t.start for rank in ranks for t in rank if t.action.kind != ActionKind.UPDATE]
    return min(durations, default=1.0)
