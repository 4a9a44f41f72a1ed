"""A profiled graph of layers, cut into the stages of a pipeline with replicas, as PipeDream's optimizer does it.

A stage has the nodes of one closed set that a smaller one lacks; a closed set has all predecessors of its nodes. With
r replicas over links of B bytes per second, and with C, W and A as the sums of compute time, parameter bytes and
activation bytes, a stage takes ``(C + 4 (r - 1) W / (B r)) / r``. If transfers of activations count, a stage other than
the first takes at least ``2 X / (B r)`` for both of its ends, where X is the sum of the activation bytes of the nodes
that have an edge out of the closed set. The objective is the slowest stage's time. If k machines work on later stages,
``ceil(k / r) * (A + W)`` has to be within the memory cap.

(Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, section 3.2. The published program
has the sum of the two times where the paper has the larger one, and 4 where the paper has 2. It drops nodes whose
description begins with ``Input``, then nodes without successor whose description begins with ``__getitem__``.)

On two levels, an outer stage is a pipeline on all machines of the inner level, and the time of that takes the place of
C. The all-reduce term of the first outer stage is divided by the machines of the inner level, as the published program
has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, amount, count, items
from hydra_ext.plan.solution import Solution

MOST_MACHINES = 1023  # of a level

_Stage = tuple[int, list[int], list["_Stage"]]


@dataclass(frozen=True, kw_only=True)
class _Node:
    id: int | str
    description: str
    compute_ms: float
    activation_bytes: float
    parameter_bytes: float


def solve(problem: Mapping[str, object]) -> Solution:
    """Finds the stages whose slowest one is fastest.

    Graphs with few closed sets get an optimal plan. Others get a plan whose cuts come from a family of closed sets, and
    a bound from a relaxation; the amount of work is limited, and equal problems have equal solutions.

    Args:
        problem: ``profile`` (``nodes`` with ``id``, ``desc``, ``forward_ms``, ``backward_ms``, ``activation_bytes``,
            ``parameter_bytes``; ``edges`` as pairs of ids), ``machines`` and ``bandwidth_bytes_per_s`` (one number
            for each level, the inner one first), ``memory_cap_bytes`` (or None), and the booleans ``hierarchical``,
            ``straight`` (one replica for each stage), ``use_fewer_machines`` and
            ``activation_transfers_in_objective``.

    Raises:
        PlanError: An entry is missing or makes no sense, or the edges form a cycle. The message names the entry.

    Returns:
        The objective in milliseconds for one minibatch, and the plan ``[[replicas, [node ids]], ...]`` in the order of
        the pipeline. On two levels each stage has a third item, its inner plan of the same form.
    """
    given = Fields(problem, "problem")
    levels = _levels(given)
    nodes, edges = _graph(given.fields("profile"))
    cap = given.value("memory_cap_bytes")
    partition = _C.partition_pipeline(
        [(node.compute_ms, node.activation_bytes, node.parameter_bytes) for node in nodes],
        edges,
        levels=levels,
        memory_cap=None if cap is None else amount(cap, "problem['memory_cap_bytes']"),
        straight=_flag(given, "straight"),
        fewer=_flag(given, "use_fewer_machines"),
        transfers=_flag(given, "activation_transfers_in_objective"),
    )
    if partition is None:
        return Solution(objective=None, plan=None, bound=None)
    objective, bound, stages = partition
    return Solution(objective=objective, plan=_plan(stages, nodes, inner=len(levels) > 1), bound=bound)


def _plan(stages: Sequence[_Stage], nodes: Sequence[_Node], *, inner: bool) -> list[object]:
    plan: list[object] = []
    for replicas, members, inside in stages:
        stage: list[object] = [replicas, [nodes[node].id for node in members]]
        if inner:
            stage.append(_plan(inside, nodes, inner=False))
        plan.append(stage)
    return plan


def _flag(given: Fields, key: str) -> bool:
    value = given.value(key)
    if not isinstance(value, bool):
        raise PlanError(f"problem['{key}'] is a {type(value).__name__}: give true or false")
    return value


def _levels(given: Fields) -> list[tuple[int, float]]:
    machines = [count(each, f"problem['machines'][{i}]") for i, each in enumerate(given.items("machines"))]
    links = [
        amount(each, f"problem['bandwidth_bytes_per_s'][{i}]")
        for i, each in enumerate(given.items("bandwidth_bytes_per_s"))
    ]
    needed = 2 if _flag(given, "hierarchical") else 1
    for name, values in (("machines", machines), ("bandwidth_bytes_per_s", links)):
        if len(values) != needed:
            raise PlanError(
                f"problem['{name}'] has {len(values)} numbers: give {needed}, since 'hierarchical' is {needed == 2}"
            )
    for i, each in enumerate(machines):
        if each > MOST_MACHINES:
            raise PlanError(f"problem['machines'][{i}] is {each}: give at most {MOST_MACHINES} for each level")
    for i, link in enumerate(links):
        if link == 0:
            raise PlanError(f"problem['bandwidth_bytes_per_s'][{i}] is 0: give a number above 0")
    return list(zip(machines, links, strict=True))


def _graph(profile: Fields) -> tuple[list[_Node], list[tuple[int, int]]]:
    """The nodes that stages are made of, and the edges between them by index."""
    nodes = [_node(each, f"nodes[{i}]") for i, each in enumerate(profile.items("nodes"))]
    if not nodes:
        raise PlanError("profile['nodes'] is empty: give at least one layer")
    index: dict[int | str, int] = {}
    for i, node in enumerate(nodes):
        if node.id in index:
            raise PlanError(f"nodes[{i}]['id'] is {node.id!r}, as nodes[{index[node.id]}]['id']: give each id once")
        index[node.id] = i
    edges = [_edge(each, index, f"edges[{i}]") for i, each in enumerate(profile.items("edges"))]
    _check_order(nodes, edges)
    kept = {i for i, node in enumerate(nodes) if not node.description.startswith("Input")}
    used = {source for source, target in edges if source in kept and target in kept}
    kept = {i for i in kept if i in used or not nodes[i].description.startswith("__getitem__")}
    if not kept:
        raise PlanError(f"profile['nodes'] has {len(nodes)} nodes, and none but inputs: give at least one layer")
    place = {node: i for i, node in enumerate(sorted(kept))}
    return (
        [nodes[i] for i in sorted(kept)],
        [(place[source], place[target]) for source, target in edges if source in kept and target in kept],
    )


def _node(node: object, name: str) -> _Node:
    given = Fields(node, name)
    description = given.value("desc")
    if not isinstance(description, str):
        raise PlanError(f"{name}['desc'] is a {type(description).__name__}: give a text")
    return _Node(
        id=_id(given.value("id"), f"{name}['id']"),
        description=description,
        compute_ms=given.amount("forward_ms") + given.amount("backward_ms"),
        activation_bytes=given.amount("activation_bytes"),
        parameter_bytes=given.amount("parameter_bytes"),
    )


def _id(value: object, name: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(f"{name} is a {type(value).__name__}: give a whole number or a text")
    return value


def _edge(edge: object, index: Mapping[int | str, int], name: str) -> tuple[int, int]:
    ends = items(edge, name)
    if len(ends) != 2:
        raise PlanError(f"{name} has {len(ends)} entries: give the ids of two nodes")
    found = []
    for i, end in enumerate(ends):
        known = _id(end, f"{name}[{i}]")
        if known not in index:
            raise PlanError(f"{name}[{i}] is {known!r}, which is no id of a node: give one of the {len(index)} ids")
        found.append(index[known])
    return found[0], found[1]


def _check_order(nodes: Sequence[_Node], edges: Sequence[tuple[int, int]]) -> None:
    missing = [0] * len(nodes)
    successors: list[list[int]] = [[] for _ in nodes]
    for source, target in edges:
        missing[target] += 1
        successors[source].append(target)
    ready = [i for i, count_missing in enumerate(missing) if not count_missing]
    for node in ready:  # grows while it is read
        for after in successors[node]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    if len(ready) < len(nodes):
        stuck = next(i for i, count_missing in enumerate(missing) if count_missing)
        raise PlanError(f"'edges' form a cycle that node {nodes[stuck].id!r} waits for: give a graph without cycles")
