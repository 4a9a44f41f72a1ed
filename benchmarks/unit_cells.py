"""Batches of models that are cut into shards: those of Hydra's simulations, and some with loads."""

from __future__ import annotations

import random
from typing import Any

Problem = dict[str, Any]


def cell(seed: int, *, models: int, devices: int, equal: bool) -> Problem:
    """Models of Hydra's simulations: an epoch each. Equal ones take 2 h and have 2000 units."""
    rng = random.Random(seed)
    jobs = []
    for i in range(models):
        units = 2000 if equal else rng.randint(100, 10_000)
        hours = 2.0 if equal else rng.uniform(0.5, 4.0)
        jobs.append({"name": f"model{i}", "batches": units, "unit_seconds": [hours * 3600 / units]})
    return {"devices": devices, "jobs": jobs}


def sharded(
    models: int, *, devices: int, microbatches: int, load: float, shards: int = 3, batches: int = 20
) -> Problem:
    """Equal models. A microbatch takes 1 s a shard forward and 2 s backward, a load as many seconds as is said."""
    forward = [[1.0, shard, load] for shard in range(shards) for _ in range(microbatches)]
    backward = [[2.0, shard, load] for shard in reversed(range(shards)) for _ in range(microbatches)]
    jobs = [{"name": f"model{i}", "batches": batches, "units": [*forward, *backward]} for i in range(models)]
    return {"devices": devices, "jobs": jobs, "link": 1.0}
