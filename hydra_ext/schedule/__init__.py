"""Pipeline schedules as data: what every rank does, in which order, before anything runs.

    >>> from hydra_ext import schedule
    >>> plan = schedule.make("2bw", stages=4, microbatches=8)
    >>> plan.body(0)[:3]
    [U0 of batch -2, F0.0 of batch 0, B0.5 of batch -1]

A *stage* is consecutive blocks on one rank, a *microbatch* what runs through the stages at once, a *batch* what one
step trains with. A schedule has for every rank a *body*: its actions in one step, in order, with batches counted from
that of the step. Version t + 1 of a stage's weights is made by the update with batch t's gradients.
"""

from __future__ import annotations

from hydra_ext._C import Action, ActionKind
from hydra_ext.schedule.schedule import KINDS, Schedule, Stream, make

__all__ = ["KINDS", "Action", "ActionKind", "Schedule", "Stream", "make"]
