"""Schedules of jobs as a mixed integer program over whole seconds, which HiGHS solves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array


def makespan_by_milp(problem: Mapping[str, Any], horizon: int) -> float:
    """The least makespan of jobs with whole seconds above 0, if it is at most ``horizon``."""
    starts = [
        (i, option["gpus"], node, begin, begin + int(option["runtime_s"]))
        for i, job in enumerate(problem["jobs"])
        for option in job["options"]
        for node, gpus in enumerate(problem["nodes"])
        if option["gpus"] <= gpus
        for begin in range(horizon - int(option["runtime_s"]) + 1)
    ]
    jobs, nodes = len(problem["jobs"]), len(problem["nodes"])
    last = len(starts)  # the makespan's column
    placed = lil_array((jobs, last + 1))
    ends = lil_array((jobs, last + 1))
    used = lil_array((nodes * horizon, last + 1))
    for column, (i, gpus, node, begin, end) in enumerate(starts):
        placed[i, column] = 1
        ends[i, column] = end
        for moment in range(begin, end):
            used[node * horizon + moment, column] = gpus
    ends[:, [last]] = -np.ones((jobs, 1))
    found = milp(
        c=np.append(np.zeros(last), 1.0),
        integrality=np.append(np.ones(last), 0),
        bounds=Bounds(np.zeros(last + 1), np.append(np.ones(last), horizon)),
        constraints=[
            LinearConstraint(placed.tocsr(), 1, 1),
            LinearConstraint(ends.tocsr(), -np.inf, 0),
            LinearConstraint(used.tocsr(), 0, np.repeat(problem["nodes"], horizon)),
        ],
    )
    if not found.success:
        raise ValueError(f"HiGHS: {found.message}")
    return float(found.fun)
