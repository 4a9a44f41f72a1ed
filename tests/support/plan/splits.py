"""Graphs of layers cut into stages: problems, an evaluator of plans, and the best plan by trying all of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Problem = dict[str, Any]
Plan = Sequence[Any]  # [replicas, ids, ids that are recomputed] for each stage

BYTES = (0.0, 10.0, 40.0, 90.5)


def make_node(id: int | str, name: str, rng: random.Random) -> dict[str, Any]:
    """Recomputing usually takes longer and holds fewer bytes for each microbatch in flight; here not always."""
    time, held = rng.choice((0.0, 1.0, 2.5, 4.0)), float(rng.randrange(0, 60))
    usual = rng.random() < 0.8
    return {
        "id": id,
        "name": name,
        "parameter_bytes": rng.choice(BYTES),
        "vanilla": {"time": time, "mem_a": held, "mem_b": float(rng.randrange(0, 20))},
        "recompute": {
            "time": time * 1.25 if usual else rng.choice((0.0, 1.0, 5.0)),
            "mem_a": held / 8 if usual else float(rng.randrange(0, 60)),
            "mem_b": float(rng.randrange(0, 30)),
        },
    }


def make_problem(rng: random.Random, *, layers: int, devices: int, counted: bool = False) -> Problem:
    """A random graph. Its ids are in no order; `counted` makes some layers transformer layers."""
    ids = rng.sample(range(100, 200), layers)
    names = ["ParallelTransformerLayer" if counted and rng.random() < 0.7 else "layer" for _ in ids]
    edges = [
        [ids[a], ids[b], rng.choice(BYTES)]
        for a, b in itertools.combinations(range(layers), 2)
        if rng.random() < (0.8 if b == a + 1 else 0.2)
    ]
    nodes = [make_node(id, name, rng) for id, name in zip(ids, names, strict=True)]
    rng.shuffle(edges)
    order = list(ids)
    rng.shuffle(nodes)
    return {
        "model": {"nodes": nodes, "edges": edges},
        "memory_bytes": float(rng.choice((40, 100, 150, 250, 1000))),
        "devices": rng.randrange(1, devices + 1),
        "microbatches_per_batch": rng.choice((1, 2, 4, 6, 12)),
        "bandwidth_bytes_per_s": rng.choice((10.0, 100.0, 1000.0)),
        "order": order,
    }


def way_of(node: Mapping[str, Any], recomputed: bool) -> Mapping[str, float]:
    found: Mapping[str, float] = node["recompute" if recomputed else "vanilla"]
    return found


def stage_time(problem: Problem, replicas: int, ids: Sequence[int], recomputed: Sequence[int]) -> float:
    nodes = {node["id"]: node for node in problem["model"]["nodes"]}
    crossing = sum(size for a, b, size in problem["model"]["edges"] if (a in ids) != (b in ids))
    weights = sum(nodes[id]["parameter_bytes"] for id in ids)
    sums = 4 * (replicas - 1) / replicas * weights / problem["microbatches_per_batch"]
    transfers = (2 * crossing / replicas + sums) / problem["bandwidth_bytes_per_s"]
    return float(transfers + sum(way_of(nodes[id], id in recomputed)["time"] for id in ids) / replicas)


def stage_bytes(problem: Problem, held: int, ids: Sequence[int], recomputed: Sequence[int]) -> float:
    nodes = {node["id"]: node for node in problem["model"]["nodes"]}
    ways = [way_of(nodes[id], id in recomputed) for id in ids]
    return sum(way["mem_a"] * held + way["mem_b"] for way in ways)


def judge(problem: Problem, plan: Plan) -> float:
    """The time of a plan, which has to be allowed."""
    place = {id: number for number, (_, ids, _) in enumerate(plan) for id in ids}
    assert sorted(place) == sorted(node["id"] for node in problem["model"]["nodes"])
    assert len(place) == sum(len(ids) for _, ids, _ in plan)
    assert all(place[a] <= place[b] for a, b, _ in problem["model"]["edges"])
    later = sum(replicas for replicas, _, _ in plan)
    assert later <= min(problem["devices"], problem["microbatches_per_batch"])
    slowest = 0.0
    for replicas, ids, recomputed in plan:
        assert ids
        assert set(recomputed) <= set(ids)
        assert problem["microbatches_per_batch"] % replicas == 0
        held = math.ceil(later / replicas)
        assert stage_bytes(problem, held, ids, recomputed) <= problem["memory_bytes"]
        slowest = max(slowest, stage_time(problem, replicas, ids, recomputed))
        later -= replicas
    return slowest


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def subsets(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(ids, size) for size in range(len(ids) + 1))


def best_unequal(problem: Problem) -> float | None:
    """The best plan's time: by all first stages, their replicas and recomputed layers, and the best rest behind."""
    edges = problem["model"]["edges"]
    known: dict[tuple[frozenset[int], int], float] = {}

    def stage(ids: Sequence[int], replicas: int, held: int) -> float:
        fitting = [
            stage_time(problem, replicas, ids, recomputed)
            for recomputed in subsets(ids)
            if stage_bytes(problem, held, ids, recomputed) <= problem["memory_bytes"]
        ]
        return min(fitting, default=math.inf)

    def rest(left: frozenset[int], devices: int) -> float:
        """The layers that are left, on exactly so many devices."""
        if not left or not devices:
            return 0.0 if not left and not devices else math.inf
        if (left, devices) not in known:
            best = math.inf
            for ids in subsets(sorted(left)):
                if ids and all(a in ids or a not in left for a, b, _ in edges if b in ids):
                    for replicas in divisors(problem["microbatches_per_batch"]):
                        if replicas <= devices:
                            behind = rest(left - set(ids), devices - replicas)
                            if behind < best:
                                own = stage(ids, replicas, math.ceil(devices / replicas))
                                best = min(best, max(own, behind))
            known[left, devices] = best
        return known[left, devices]

    everything = frozenset(node["id"] for node in problem["model"]["nodes"])
    most = min(problem["devices"], problem["microbatches_per_batch"])
    best = min(rest(everything, devices) for devices in range(1, most + 1))
    return None if math.isinf(best) else best
