"""Pipelines of profiled graphs: random problems, what a plan costs, and the best plan by trying all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Problem = Mapping[str, Any]
Plan = Sequence[Any]


class NotAPlan(Exception):
    """The stages are no plan of the problem."""


@dataclass(frozen=True)
class Stage:
    """The nodes of ``end`` that ``begin`` lacks, on some replicas, with machines behind it."""

    replicas: int
    begin: frozenset[Any]
    end: frozenset[Any]
    later: int


class Judge:
    """What plans of a problem cost."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        profile = problem["profile"]
        nodes = {node["id"]: node for node in profile["nodes"] if not node["desc"].startswith("Input")}
        edges = [(a, b) for a, b in profile["edges"] if a in nodes and b in nodes]
        leaves = set(nodes) - {a for a, _ in edges}
        dropped = {each for each in leaves if nodes[each]["desc"].startswith("__getitem__")}
        self.nodes = {each: node for each, node in nodes.items() if each not in dropped}
        self.edges = [(a, b) for a, b in edges if b not in dropped]
        self.everything = frozenset(self.nodes)
        self.cap = problem["memory_cap_bytes"]

    @cached_property
    def closed_sets(self) -> list[frozenset[Any]]:
        found = {frozenset[Any]()}
        waiting = list(found)
        while waiting:
            mine = waiting.pop()
            for node in self.everything - mine:
                if all(a in mine for a, b in self.edges if b == node) and mine | {node} not in found:
                    found.add(mine | {node})
                    waiting.append(mine | {node})
        return sorted(found, key=len)

    def is_closed(self, nodes: frozenset[Any]) -> bool:
        return nodes <= self.everything and all(a in nodes for a, b in self.edges if b in nodes)

    def crossing(self, closed: frozenset[Any]) -> float:
        leaving = {a for a, b in self.edges if a in closed and b not in closed}
        return math.fsum(self.nodes[each]["activation_bytes"] for each in leaving)

    def sums(self, stage: Stage) -> tuple[float, float, float]:
        inside = [self.nodes[each] for each in stage.end - stage.begin]
        return (
            math.fsum(each["forward_ms"] + each["backward_ms"] for each in inside),
            math.fsum(each["parameter_bytes"] for each in inside),
            math.fsum(each["activation_bytes"] for each in inside),
        )

    def cost(self, stage: Stage, *, level: int, first: bool, compute: float | None = None, share: int = 1) -> float:
        """Milliseconds of a stage; infinity if it does not fit."""
        milliseconds, weights, activations = self.sums(stage)
        if compute is not None:
            milliseconds = compute
        if self.problem["straight"] and stage.replicas != 1:
            return math.inf
        if self.cap is not None and math.ceil(stage.later / stage.replicas) * (activations + weights) > self.cap:
            return math.inf
        r = stage.replicas
        link = self.problem["bandwidth_bytes_per_s"][level] / 1000
        cost = (milliseconds + 4 * (r - 1) * weights / (link * r) / share) / r
        if self.problem["activation_transfers_in_objective"] and not first:
            cost = max(cost, *(2 * self.crossing(each) / (link * r) for each in (stage.begin, stage.end)))
        return cost

    def objective(self, plan: Plan) -> float:
        """Milliseconds of the slowest stage. Raises NotAPlan."""
        levels = len(self.problem["machines"])
        if levels == 1:
            return self._value(plan, frozenset(), self.everything, level=0, last=True)
        return self._value(plan, frozenset(), self.everything, level=1, last=True)

    def _value(self, plan: Plan, begin: frozenset[Any], end: frozenset[Any], *, level: int, last: bool) -> float:
        machines = self.problem["machines"][level]
        used = sum(stage[0] for stage in plan)
        if used > machines or (used < machines and not (last and self.problem["use_fewer_machines"])):
            raise NotAPlan(f"{used} of {machines} machines are used")
        slowest = 0.0
        closed, later = begin, used
        for i, (replicas, nodes, *inner) in enumerate(plan):
            later -= replicas
            before, closed = closed, closed | set(nodes)
            if not self.is_closed(closed) or not nodes or set(nodes) & before or replicas < 1:
                raise NotAPlan(f"stage {i} does not end at a cut")
            stage = Stage(replicas, before, closed, later)
            inside = self._value(inner[0], before, closed, level=0, last=False) if level == 1 else None
            share = self.problem["machines"][0] if level == 1 and i == 0 else 1
            slowest = max(slowest, self.cost(stage, level=level, first=i == 0, compute=inside, share=share))
        if closed != end:
            raise NotAPlan("a node is in no stage, or in a stage of another part")
        return slowest

    # ---- all plans --------------------------------------------------------------------------------------------------
    def best(self) -> float:
        """The least objective of all plans; infinity if nothing fits."""
        level = len(self.problem["machines"]) - 1
        return min((self._cost_of(chain, level) for chain in self._chains(level)), default=math.inf)

    def _chains(self, level: int) -> Iterator[tuple[Stage, ...]]:
        machines = self.problem["machines"][level]
        for used in range(1, machines + 1) if self.problem["use_fewer_machines"] else (machines,):
            yield from self._stages(frozenset(), self.everything, used)

    def _stages(self, begin: frozenset[Any], end: frozenset[Any], machines: int) -> Iterator[tuple[Stage, ...]]:
        for closed in self.closed_sets:
            if begin < closed <= end:
                for replicas in range(1, machines + 1):
                    stage = Stage(replicas, begin, closed, machines - replicas)
                    if closed == end and not stage.later:
                        yield (stage,)
                    elif closed != end and stage.later:
                        yield from ((stage, *rest) for rest in self._stages(closed, end, stage.later))

    def _cost_of(self, chain: tuple[Stage, ...], level: int) -> float:
        if level == 0:
            return max(self.cost(stage, level=0, first=i == 0) for i, stage in enumerate(chain))
        inner = self.problem["machines"][0]
        return max(
            self.cost(
                stage,
                level=1,
                first=i == 0,
                compute=self._inner(stage.begin, stage.end),
                share=inner if i == 0 else 1,
            )
            for i, stage in enumerate(chain)
        )

    def _inner(self, begin: frozenset[Any], end: frozenset[Any]) -> float:
        if (begin, end) not in self._known:
            chains = self._stages(begin, end, self.problem["machines"][0])
            self._known[begin, end] = min((self._cost_of(chain, 0) for chain in chains), default=math.inf)
        return self._known[begin, end]

    @cached_property
    def _known(self) -> dict[tuple[frozenset[Any], frozenset[Any]], float]:
        return {}


def random_profile(chance: random.Random, *, nodes: int, density: float) -> dict[str, Any]:
    """A graph with these nodes besides an input, with edges in both orders of the ids."""
    names = [f"n{i}" for i in range(nodes)]
    chance.shuffle(names)
    edges = [[names[i], names[j]] for j in range(nodes) for i in range(j) if chance.random() < density]
    listed = [
        {
            "id": name,
            "desc": "Linear",
            "forward_ms": chance.choice([0, 1, 2, 3.5]),
            "backward_ms": chance.choice([0, 2, 4]),
            "activation_bytes": chance.choice([0, 1000, 3000, 8000]),
            "parameter_bytes": chance.choice([0, 0, 500, 4000]),
        }
        for name in names
    ]
    source = {
        "id": "in",
        "desc": "Input0",
        "forward_ms": 9,
        "backward_ms": 0,
        "activation_bytes": 9,
        "parameter_bytes": 9,
    }
    edges += [["in", name] for name in names if all(name != target for _, target in edges)]
    chance.shuffle(listed)
    return {"nodes": [source, *listed], "edges": edges}


def random_problem(chance: random.Random, *, nodes: int, levels: int = 1, density: float = 0.4) -> dict[str, Any]:
    machines = [chance.randint(1, 4)] if levels == 1 else [chance.randint(1, 3), chance.randint(1, 3)]
    return {
        "profile": random_profile(chance, nodes=nodes, density=density),
        "machines": machines,
        "bandwidth_bytes_per_s": [chance.choice([3e5, 1e6, 1e7]) for _ in machines],
        "memory_cap_bytes": chance.choice([None, None, 2000, 8000, 20000]),
        "straight": chance.random() < 0.25,
        "hierarchical": levels == 2,
        "use_fewer_machines": chance.random() < 0.4,
        "activation_transfers_in_objective": chance.random() < 0.7,
    }
