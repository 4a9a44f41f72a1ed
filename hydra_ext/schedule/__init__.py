"""Pipeline schedules as data: the actions of every rank in order, known before anything runs.

    >>> from hydra_ext import schedule
    >>> print(schedule.make("1f1b", stages=2, microbatches=3).simulate(batches=1).grid())
    a column is 1 s; 3 is a forward of microbatch 3, [3] its backward
    rank 0 | 0  1  .  . [ 0  ] 2 [ 1  ] . [ 2  ]| 25% idle
    rank 1 | .  0 [ 0  ] 1 [ 1  ] 2 [ 2  ] .  . | 25% idle

A *stage* is consecutive blocks on one rank. A *microbatch* is the part of a batch that runs through the stages at once;
one step trains with a *batch*. A schedule has a *body* for every rank: its actions in one step, in order, with batches
counted from that of the step. The update with batch t's gradients makes version t + 1 of a stage's weights.

:func:`make` returns built-in schedules, :meth:`Schedule.parse` reads others. Both have a verifier, a simulator,
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
