"""How a fleet runs, beside its jobs and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a fleet runs.

    Attributes:
        interval: Seconds between plans, and between checkpoints.
        patience: Seconds without a step after which a job counts as hanging.
        threads: Of torch on the CPU, in each process. Sums depend on it, so it stays the same for a fleet's life.
        path: Folders where workers search for modules.
    """

    interval: float
    patience: float
    threads: int = 1
    path: Sequence[str] = ()
