"""Pipelines of small chains: what a choice costs, worked out action by action, and the best one by trying all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from typing import Any

from hydra_ext.errors import InvalidSchedule
from hydra_ext.plan import Boundary, Event, SharedParameters
from hydra_ext.plan.pipelines.chains import Chain, Overheads
from hydra_ext.plan.pipelines.question import Cluster
from hydra_ext.schedule import Schedule, make

BATCHES = 4


@dataclass(frozen=True)
class Way:
    """A choice with its cuts."""

    width: int
    depth: int
    samples: int
    microbatches: int
    kind: str
    recompute: bool
    cuts: tuple[int, ...]


def random_chain(draw: random.Random) -> dict[int, Chain]:
    """A chain of few blocks; its times grow less than the samples, as those of small microbatches do."""
    count = draw.randint(2, 5)
    fixed = [draw.random() for _ in range(count)]
    each = [draw.random() for _ in range(count)]
    ratio = draw.uniform(1, 3)
    weights = [draw.randint(0, 40) for _ in range(count)]
    saved = [draw.randint(1, 30) for _ in range(count)]
    working = [draw.randint(0, 20) for _ in range(count)]
    crossing = [draw.randint(1, 20) for _ in range(count - 1)]
    possible = [draw.random() < 0.9 for _ in range(count - 1)]
    overheads = Overheads(passing=draw.choice([0.0, 0.3]), recomputing=draw.choice([0.0, 0.5]))
    shared = tuple(
        SharedParameters(nbytes=draw.randint(1, 20), events=tuple(sorted(draw.sample(range(count), 2))))
        for _ in range(draw.randint(0, 1))
    )

    def at(samples: int) -> Chain:
        return Chain(
            samples=samples,
            names=tuple(f"block {number}" for number in range(count)),
            events=tuple(
                Event(
                    forward_seconds=fixed[i] + samples * each[i],
                    backward_seconds=ratio * (fixed[i] + samples * each[i]),
                    parameter_bytes=weights[i],
                    activation_bytes=samples * saved[i],
                )
                for i in range(count)
            ),
            boundaries=tuple(
                Boundary(crossing_bytes=samples * size, possible=may)
                for size, may in zip(crossing, possible, strict=True)
            ),
            shared=shared,
            working_bytes=tuple(samples * size for size in working),
            input_bytes=3 * samples,
            overheads=overheads,
        )

    return {samples: at(samples) for samples in range(1, 25)}


def random_cluster(draw: random.Random) -> Cluster:
    return Cluster(
        devices=draw.choice([1, 2, 3, 4, 6]),
        bytes_per_second=draw.choice([float("inf"), 100.0, 10.0]),
        latency=draw.choice([0.0, 0.2]),
        update_seconds=draw.choice([0.0, 0.01]),
        state_copies=draw.choice([0.0, 2.0]),
        weights_at_home=draw.random() < 0.2,
        overlap=draw.random() < 0.7,
    )


def all_ways(chains: dict[int, Chain], devices: int, batch: int) -> Iterator[Way]:
    possible = [number for number, boundary in enumerate(chains[1].boundaries, 1) if boundary.possible]
    for width in range(1, devices + 1):
        for samples in range(1, batch + 1):
            if devices % width or batch % (width * samples):
                continue
            depth, count = devices // width, batch // width // samples
            for kind in ("1f1b", "gpipe", "2bw", "interleaved"):
                rounds = range(2, 5) if kind == "interleaved" and depth > 1 else range(1, 2)
                if kind == "interleaved" and depth == 1:
                    continue
                for stages in (depth * each for each in rounds):
                    try:
                        make(kind, stages=stages, ranks=depth, microbatches=count)
                    except InvalidSchedule:
                        continue
                    for cuts in filter(partial(allowed, chains[1], depth), combinations(possible, stages - 1)):
                        for recompute in (False, True):
                            yield Way(width, depth, samples, count, kind, recompute, cuts)


def allowed(chain: Chain, depth: int, cuts: tuple[int, ...]) -> bool:
    """No rank holds one parameter in two stages."""
    for each in chain.shared:
        ranks = [stage % depth for stage in {sum(cut <= event for cut in cuts) for event in each.events}]
        if len(ranks) != len(set(ranks)):
            return False
    return True


def schedule_of(way: Way) -> Schedule:
    return make(way.kind, stages=len(way.cuts) + 1, ranks=way.depth, microbatches=way.microbatches)


# ---- bytes ----------------------------------------------------------------------------------------------------------
def rank_bytes(way: Way, chain: Chain, cluster: Cluster) -> list[float]:
    held, passing = [0.0] * way.depth, [0.0] * way.depth
    borders = [0, *way.cuts, len(chain.events)]
    for stage, (begin, end) in enumerate(pairwise(borders)):
        flying, gradients = peaks(schedule_of(way), stage)
        own, rank = chain.events[begin:end], stage % way.depth
        saved = sum(event.activation_bytes for event in own)
        working = max(chain.working_bytes[begin:end])
        if way.recompute:
            arriving = chain.boundaries[begin - 1].crossing_bytes if begin else 0
            held[rank] += flying * (arriving + chain.input_bytes)
            passing[rank] = max(passing[rank], saved + working)
        else:
            held[rank] += flying * saved
            passing[rank] = max(passing[rank], working)
        if cluster.weights_at_home:
            held[rank] += 2 * max(event.parameter_bytes for event in own)
        else:
            versions = 2 if way.kind == "2bw" else 1
            held[rank] += (versions + gradients + cluster.state_copies) * weights(chain, begin, end)
    return [sum(both) for both in zip(held, passing, strict=True)]


def weights(chain: Chain, begin: int, end: int) -> int:
    here = set(range(begin, end))
    return sum(chain.events[event].parameter_bytes for event in here) + sum(
        each.nbytes for each in chain.shared if here & set(each.events)
    )


def peaks(schedule: Schedule, stage: int) -> tuple[int, int]:
    """The most microbatches between forward and backward, and batches between first backward and update."""
    flying, most, begun, gradients = 0, 0, set[Any](), 0
    for action in schedule.unroll(BATCHES)[schedule.stage_rank(stage)]:
        if action.stage != stage:
            continue
        if action.token.startswith("F"):
            flying += 1
        elif action.token.startswith("B") and not action.token.startswith("BU"):
            flying -= 1
            begun.add(action.batch)
        elif action.token.startswith("U"):
            begun.discard(action.batch)
        most, gradients = max(most, flying), max(gradients, len(begun))
    return most, gradients


# ---- seconds --------------------------------------------------------------------------------------------------------
def seconds(way: Way, chain: Chain, cluster: Cluster) -> float:
    half = BATCHES // 2
    return (end_of(way, chain, cluster, BATCHES) - end_of(way, chain, cluster, half)) / (BATCHES - half)


def end_of(way: Way, chain: Chain, cluster: Cluster, batches: int) -> float:
    """When the last of all actions ends. Each rank takes its own in order, as soon as what it needs is there."""
    borders = [0, *way.cuts, len(chain.events)]
    schedule = schedule_of(way)
    lists = schedule.unroll(batches)
    forward, backward = _stage_seconds(way, chain, borders)
    sizes = [weights(chain, a, b) for a, b in pairwise(borders)]
    arrived: dict[tuple[str, int, int, int], float] = {}
    summed: dict[tuple[int, int], float] = {}
    free: dict[tuple[str, int], float] = {}
    clock, next_of, last = [0.0] * way.depth, [0] * way.depth, 0.0
    stages = len(forward)

    def take(rank: int) -> bool:
        nonlocal last
        action = lists[rank][next_of[rank]]
        stage, key, now = action.stage, (action.batch, action.microbatch), clock[rank]
        name = action.token.split(str(stage))[0]
        end = now
        if name in ("F", "B"):
            need = ("value", stage, *key) if name == "F" else ("gradient", stage, *key)
            if (stage > 0) if name == "F" else (stage < stages - 1):
                if need not in arrived:
                    return False
                now = max(now, arrived[need])
            end = clock[rank] = now + (forward[stage] if name == "F" else backward[stage])
            to = ("value", stage + 1, *key) if name == "F" else ("gradient", stage - 1, *key)
            if 0 <= to[1] < stages and to[1] % way.depth == rank:
                arrived[to] = end
        elif name in ("SF", "SB"):
            border = borders[stage + 1] if name == "SF" else borders[stage]
            hop = (name, border)
            start = max(now, free.get(hop, 0.0))
            free[hop] = start + chain.boundaries[border - 1].crossing_bytes / cluster.bytes_per_second
            end = free[hop] + cluster.latency
            clock[rank] = now if cluster.overlap else end
            arrived[("value", stage + 1, *key) if name == "SF" else ("gradient", stage - 1, *key)] = end
        elif name == "R":
            took = 0.0
            if way.width > 1:
                took = 2 * (way.width - 1) * sizes[stage] / way.width / cluster.bytes_per_second + cluster.latency
            end = free["sums", rank] = max(now, free.get(("sums", rank), 0.0)) + took
            summed[stage, action.batch] = end
            clock[rank] = now if cluster.overlap else end
        elif name == "U":
            end = clock[rank] = max(now, summed[stage, action.batch]) + cluster.update_seconds * sizes[stage]
        next_of[rank] += 1
        last = max(last, end)
        return True

    while any(next_of[rank] < len(lists[rank]) for rank in range(way.depth)):
        went = False
        for rank in range(way.depth):
            while next_of[rank] < len(lists[rank]) and take(rank):
                went = True
        assert went, "ranks block each other"
    return last


def _stage_seconds(way: Way, chain: Chain, borders: list[int]) -> tuple[list[float], list[float]]:
    forward, backward = [], []
    for begin, end in pairwise(borders):
        own = chain.events[begin:end]
        forward.append(chain.overheads.passing + sum(event.forward_seconds for event in own))
        again = forward[-1] + chain.overheads.recomputing if way.recompute else 0.0
        backward.append(sum(event.backward_seconds for event in own) + again)
    return forward, backward
