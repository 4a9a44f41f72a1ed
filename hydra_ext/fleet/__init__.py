"""The fleet: many jobs on few devices.

A *job* is one model's training. A *technique* is a way to run it on one device or several; the processes that do are
its *gang*. *Trials* measure what would do, the planner (``hydra_ext.plan.solve("spase", ...)``) chooses option, node
and time for each job, and the *scheduler* carries the plan out on a *cluster*: this machine, or one in virtual time.

Sources: Hydra (arXiv:2110.08633) and Saturn (VLDB 2024, arXiv:2311.02840).
"""

from hydra_ext.fleet.fleet import Fleet
from hydra_ext.fleet.guides import Guide, MedianStopping, SuccessiveHalving
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.reporting.status import FleetState, FleetStatus, JobStatus
from hydra_ext.fleet.results import JobResult, Outcome, Results, Stretch
from hydra_ext.fleet.scheduling.records import JobState
from hydra_ext.fleet.techniques import Gang, Session, Technique, WontDo
from hydra_ext.fleet.tracking import Tracker

__all__ = [
    "Fleet",
    "FleetState",
    "FleetStatus",
    "Gang",
    "Guide",
    "Job",
    "JobResult",
    "JobState",
    "JobStatus",
    "MedianStopping",
    "Outcome",
    "Results",
    "Session",
    "Stretch",
    "SuccessiveHalving",
    "Technique",
    "Tracker",
    "WontDo",
]
