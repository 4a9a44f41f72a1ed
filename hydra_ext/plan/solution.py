"""What a planner found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan, and how good it is.

    Attributes:
        objective: The plan's value in the problem's unit; None if nothing fits.
        plan: The plan in the form of its kind, of lists, numbers and strings; None if nothing fits.
        bound: A proved bound on the objective of every plan; None if none is known.
    """

    objective: float | None
    plan: list[object] | None
    bound: float | None

    @property
    def gap(self) -> float | None:
        """The relative distance between objective and bound; 0 if the plan is proved to be optimal."""
        if self.objective is None or self.bound is None:
            return None
        return abs(self.objective - self.bound) / abs(self.objective) if self.objective else 0.0
