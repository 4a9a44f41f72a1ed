"""The kinds of planning problems, and which module solves each."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Protocol, cast

from hydra_ext.errors import PlanError
from hydra_ext.plan.solution import Solution

PLANNERS = {
    "chain": "hydra_ext.plan.checkpointing",
    "equal_split": "hydra_ext.plan.equal_split",
    "pipedream": "hydra_ext.plan.pipedream",
    "twobw": "hydra_ext.plan.twobw",
    "unequal_split": "hydra_ext.plan.unequal_split",
    "width_depth": "hydra_ext.plan.width_depth",
}


class Planner(Protocol):
    def solve(self, problem: Mapping[str, object]) -> Solution: ...


def solve(kind: str, problem: Mapping[str, object]) -> Solution:
    """Finds the best plan of a problem.

    Args:
        kind: ``"pipedream"``, ``"equal_split"``, ``"unequal_split"``, ``"width_depth"``, ``"twobw"`` or ``"chain"``.
        problem: The problem in the form of its kind, as its JSON is read. Entries that the kind does not know are
            ignored.

    Raises:
        PlanError: The kind is unknown, or the problem makes no sense. The message names the entry.

    Returns:
        The plan, its objective, and a proved bound on the objective of all plans.
    """
    if not isinstance(kind, str) or kind not in PLANNERS:
        raise PlanError(f"kind={kind!r} is not known: give one of {', '.join(PLANNERS)}")
    if not isinstance(problem, Mapping):
        raise PlanError(f"problem= is a {type(problem).__name__}: give a mapping in the form of kind '{kind}'")
    planner = cast(Planner, importlib.import_module(PLANNERS[kind]))
    solution = planner.solve(problem)
    if solution.objective is not None and not math.isfinite(solution.objective):
        raise PlanError(f"the best plan's objective is {solution.objective}: give smaller numbers")
    return solution
