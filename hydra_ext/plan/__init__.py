"""Planners: what to put where, before anything runs. Decisions only; no tensors, no torch."""

from hydra_ext.plan.chain import Boundary, Event, Partition, SharedParameters, Stage, partition_chain

__all__ = ["Boundary", "Event", "Partition", "SharedParameters", "Stage", "partition_chain"]
