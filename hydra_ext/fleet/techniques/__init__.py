"""Techniques: the ways in which a job can be trained on one device or several.

A technique opens a *session*: one job's model and optimizer in this process, as one rank of the job's *gang*. The
training loop (:mod:`hydra_ext.fleet.cluster.training`) is the same for all of them.
"""

from __future__ import annotations

from hydra_ext.fleet.techniques.interface import Gang, OwnOptions, Session, Technique, WontDo
from hydra_ext.fleet.techniques.registry import DEFAULT, technique_named

__all__ = ["DEFAULT", "Gang", "OwnOptions", "Session", "Technique", "WontDo", "technique_named"]
