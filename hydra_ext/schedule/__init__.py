"""Pipeline schedules as data: what every rank does, in which order, before anything runs.

    >>> from hydra_ext import schedule
    >>> print(schedule.make("1f1b", stages=2, microbatches=3).simulate(batches=1).grid())
    a column is 1 s; 3 is a forward of microbatch 3, [3] its backward
    rank 0 | 0  1  .  . [ 0  ] 2 [ 1  ] . [ 2  ]| 25% idle
    rank 1 | .  0 [ 0  ] 1 [ 1  ] 2 [ 2  ] .  . | 25% idle

A *stage* is consecutive blocks on one rank, a *microbatch* what runs through the stages at once, a *batch* what one
step trains with. A schedule has for every rank a *body*: its actions in one step, in order, with batches counted from
that of the step. Version t + 1 of a stage's weights is made by the update with batch t's gradients.

Built-in ones come from :func:`make`, any other from :meth:`Schedule.parse`; for both there is a verifier, a simulator,
pictures, and the stream of actions that a rank runs.
"""

from __future__ import annotations

from hydra_ext._C import Action, ActionKind, SchedulePeaks, TimedAction, Verification
from hydra_ext.schedule.schedule import KINDS, Schedule, Stream, make
from hydra_ext.schedule.simulation import Simulation

__all__ = [
    "KINDS",
    "Action",
    "ActionKind",
    "Schedule",
    "SchedulePeaks",
    "Simulation",
    "Stream",
    "TimedAction",
    "Verification",
    "make",
]
