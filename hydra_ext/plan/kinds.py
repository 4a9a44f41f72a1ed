"""The kinds of planning problems, and which module solves each."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Protocol, cast

from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import size
from hydra_ext.plan.solution import Solution

PLANNERS = {
    "chain": "hydra_ext.plan.checkpointing",
    "equal_split": "hydra_ext.plan.graphs.equal_split",
    "pipedream": "hydra_ext.plan.pipedream",
    "spase": "hydra_ext.plan.spase",
    "twobw": "hydra_ext.plan.twobw",
    "unequal_split": "hydra_ext.plan.graphs.unequal_split",
    "units": "hydra_ext.plan.units",
    "width_depth": "hydra_ext.plan.width_depth",
}
SETTINGS = {"seed": ("spase", "units"), "effort": ("spase",)}  # and the kinds that take them


class Planner(Protocol):
    def solve(self, problem: Mapping[str, object], **settings: int) -> Solution: ...


def solve(kind: str, problem: Mapping[str, object], *, seed: int | None = None, effort: int | None = None) -> Solution:
    """Finds the best plan of a problem.

    Args:
        kind: ``"pipedream"``, ``"equal_split"``, ``"unequal_split"``, ``"width_depth"``, ``"twobw"``, ``"chain"``,
            ``"spase"`` or ``"units"``.
        problem: The problem in the form of its kind, as its JSON is read. Entries that the kind does not know are
            ignored.
        seed: Only for ``"spase"`` and ``"units"``, which may draw random numbers: 0 by default.
        effort: Only for ``"spase"``: passes of its search, 1 by default. More never give a worse plan, and take longer.

    Raises:
        PlanError: The kind is unknown, the problem makes no sense, or the kind takes no seed or no effort. The message
            names the entry.

    Returns:
        The plan, its objective, and a proved bound on the objective of all plans.
    """
    if not isinstance(kind, str) or kind not in PLANNERS:
        raise PlanError(f"kind={kind!r} is not known: give one of {', '.join(PLANNERS)}")
    if not isinstance(problem, Mapping):
        raise PlanError(f"problem= is a {type(problem).__name__}: give a mapping in the form of kind '{kind}'")
    settings = {}
    for name, value, least in (("seed", seed, 0), ("effort", effort, 1)):
        if value is None:
            continue
        if kind not in SETTINGS[name]:
            raise PlanError(
                f"{name}={value!r} is for kind {' or '.join(SETTINGS[name])}: leave it out for kind '{kind}'"
            )
        if size(value, f"{name}=") < least:
            raise PlanError(f"{name}={value!r}: give a whole number of at least {least}")
        settings[name] = value
    planner = cast(Planner, importlib.import_module(PLANNERS[kind]))
    solution = planner.solve(problem, **settings)
    if solution.objective is not None and not math.isfinite(solution.objective):
        raise PlanError(f"the best plan's objective is {solution.objective}: give smaller numbers")
    return solution
