"""Width, depth, microbatch size and recomputation, by the paper's cost, worked out here for every plan."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from hydra_ext.errors import PlanError
from hydra_ext.plan import solve

Problem = dict[str, Any]


def make_problem(rng: random.Random) -> Problem:
    sizes = sorted(rng.sample((1, 2, 3, 4, 8, 16, 32), rng.randrange(1, 6)))
    return {
        "num_blocks": rng.choice((1, 6, 24, 36)),
        "devices": rng.choice((1, 2, 8, 12, 64)),
        "gpus_per_server": rng.choice((1, 4, 8)),
        "global_batch": rng.choice((16, 24, 512)),
        "microbatch_sizes": sizes,
        "block_time_s": [1e-3 * size**0.8 for size in sizes],
        "block_activation_bytes": [4e7 * size for size in sizes],
        "boundary_activation_bytes": [1e6 * size for size in sizes],
        "block_weight_bytes": rng.choice((2.5e7, 1e9)),
        "block_optimizer_bytes": 1.7e8,
        "bw_high": 1e11,
        "bw_low": rng.choice((1e8, 3e9)),
        "device_memory_bytes": rng.choice((1e9, 8e9, 4e10)),
    }


def judge(problem: Problem, w: int, d: int, b: int, r: bool) -> float | None:
    """Samples per second, or None if the plan is not allowed."""
    blocks, devices, batch = problem["num_blocks"], problem["devices"], problem["global_batch"]
    if w * d != devices or blocks % d or batch % (w * b):
        return None
    m = batch // (w * b)
    if d > 1 and m < d:
        return None
    i = problem["microbatch_sizes"].index(b)
    weights, optimizer = (blocks * problem[f"block_{name}_bytes"] for name in ("weight", "optimizer"))
    activations, time = blocks * problem["block_activation_bytes"][i], blocks * problem["block_time_s"][i]
    io = problem["boundary_activation_bytes"][i]
    nbytes = ((2 if d > 1 else 1) * weights + optimizer) / d + (activations / d if r else activations) + d * io
    if nbytes > problem["device_memory_bytes"]:
        return None
    server, high, low = (problem[name] for name in ("gpus_per_server", "bw_high", "bw_low"))
    comm = 0 if d == 1 else 2 * io / (high if devices <= server else low)
    sums = 0 if w == 1 else 2 * (w - 1) / w * weights / d / (high if w <= server else low)
    return float(w * b / max((4 / 3 if r else 1) * time / d + comm, sums / m))


@pytest.mark.parametrize("seed", range(200))
def test_no_plan_is_faster(seed: int) -> None:
    problem = make_problem(random.Random(seed))
    numbers = range(1, problem["devices"] + 1)
    plans = itertools.product(numbers, numbers, problem["microbatch_sizes"], (False, True))
    throughputs = [found for plan in plans if (found := judge(problem, *plan)) is not None]
    found = solve("twobw", problem)
    if not throughputs:
        assert (found.objective, found.plan, found.bound, found.gap) == (None, None, None, None)
        return
    assert found.objective == pytest.approx(max(throughputs), rel=1e-12)
    w, d, b, r = found.plan or []
    assert judge(problem, w, d, b, r) == pytest.approx(found.objective, rel=1e-12)  # type: ignore[arg-type]
    assert found.gap == 0


def test_sizes_without_a_time_are_refused() -> None:
    problem = make_problem(random.Random(1))
    with pytest.raises(PlanError, match=r"'block_time_s'\] has 0 entries.*one for each size"):
        solve("twobw", {**problem, "block_time_s": []})


def test_a_model_that_takes_no_time_is_refused() -> None:
    problem = make_problem(random.Random(1)) | {"devices": 1, "device_memory_bytes": 1e15}
    problem["block_time_s"] = [0.0] * len(problem["microbatch_sizes"])
    with pytest.raises(PlanError, match="take no time"):
        solve("twobw", problem)
