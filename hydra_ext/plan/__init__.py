"""Planners, which decide before a run where a model is cut. They see numbers only: no tensors, no torch."""

from hydra_ext.plan.chain import Boundary, Event, Partition, SharedParameters, Stage, partition_chain
from hydra_ext.plan.kinds import solve
from hydra_ext.plan.solution import Solution

__all__ = ["Boundary", "Event", "Partition", "SharedParameters", "Solution", "Stage", "partition_chain", "solve"]
