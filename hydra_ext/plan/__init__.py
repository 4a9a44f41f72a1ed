"""Planners, which decide before a run where a model is cut. They see numbers only: no tensors, no torch."""

from hydra_ext.plan.kinds import solve
from hydra_ext.plan.solution import Solution

__all__ = ["Solution", "solve"]
