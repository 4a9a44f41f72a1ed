"""Width and depth, by the published planner's cost, worked out here for every pair."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hydra_ext.plan import solve

Problem = dict[str, Any]


def make_problem(rng: random.Random) -> Problem:
    return {
        "num_blocks": rng.choice((1, 3, 24, 50, 96)),
        "num_workers": rng.choice((1, 4, 12, 36, 49, 64)),
        "memory_capacity": rng.choice((1e8, 1e9, 1e10, 1e12)),
        "computation_time_per_block": rng.choice((0.0, 1e-4, 1e-3, 0.1)),
        "num_parameters_per_block": rng.choice((0, 10**6, 10**7, 10**9)),
        "num_activations_per_block": rng.choice((10**5, 10**7)),
        "output_activation_size": rng.choice((10**4, 10**6, 10**8)),
    }


def judge(problem: Problem, width: int, depth: int) -> tuple[float, float]:
    """Seconds and bytes of a plan."""
    assert width * depth == problem["num_workers"]
    blocks = math.floor(problem["num_blocks"] / depth)
    bandwidth = 1e11 if width <= 8 else 1e9
    parameters, activations = problem["num_parameters_per_block"], problem["num_activations_per_block"]
    sums = 2 * (width - 1) * parameters * blocks / bandwidth
    output = 2 * problem["output_activation_size"] / 1e9
    seconds = max(problem["computation_time_per_block"] * blocks, output, sums) / width
    if problem["num_blocks"] < depth:
        blocks = math.floor((problem["num_blocks"] + depth) / depth)
    return seconds, 4.0 * (2 * parameters * blocks + activations * blocks * depth)


@pytest.mark.parametrize("seed", range(200))
def test_no_width_and_depth_are_faster(seed: int) -> None:
    problem = make_problem(random.Random(seed))
    workers = problem["num_workers"]
    pairs = [(width, workers // width) for width in range(1, workers + 1) if workers % width == 0]
    costs = {pair: judge(problem, *pair) for pair in pairs}
    fitting = {pair: seconds for pair, (seconds, nbytes) in costs.items() if nbytes <= problem["memory_capacity"]}
    found = solve("width_depth", problem)
    if not fitting:
        assert (found.objective, found.plan, found.bound, found.gap) == (None, None, None, None)
        return
    first = min(fitting, key=lambda pair: (fitting[pair], pair))
    assert found.plan == list(first)
    assert found.objective == pytest.approx(fitting[first], rel=1e-12)
    assert found.gap == 0


def test_many_workers_are_no_trouble() -> None:
    found = solve("width_depth", make_problem(random.Random(1)) | {"num_workers": 2**31 - 2, "memory_capacity": 1e30})
    assert found.plan is not None
