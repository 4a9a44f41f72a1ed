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
C. The first stage of an inner pipeline pays for no transfer, its last one for those at its end unless that is the end
of the graph. The all-reduce term of the first outer stage is divided by the machines of the inner level. Both are as
the published program has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, amount, count, items
from hydra_ext.plan.graphs.node_index import NodeId, check_order, find, index_nodes
from hydra_ext.plan.solution import Solution

MOST_MACHINES = 1023  # of a level

_Stage = tuple[int, list[int], list["_Stage"]]


@dataclass(frozen=True, kw_only=True)
class _Node:
    id: NodeId
    description: str
    compute_ms: float
    activation_bytes: float
    parameter_bytes: float


def solve(problem: Mapping[str, object]) -> Solution:
    """Finds the stages whose slowest one is fastest.

    Graphs with few closed sets get an optimal plan. Others get a plan whose cuts come from families of closed sets, and
    a bound from a relaxation; the amount of work is limited, and equal problems have equal solutions. If the families
    of such a graph have no plan that fits, there is neither plan nor bound, though another plan may fit. That needs
    ``straight`` with a memory cap or with hundreds of machines: on replicas of all layers every graph fits.

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
        straight=given.flag("straight"),
        fewer=given.flag("use_fewer_machines"),
        transfers=given.flag("activation_transfers_in_objective"),
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


def _levels(given: Fields) -> list[tuple[int, float]]:
    machines = [count(each, f"problem['machines'][{i}]") for i, each in enumerate(given.items("machines"))]
    links = [
        amount(each, f"problem['bandwidth_bytes_per_s'][{i}]")
        for i, each in enumerate(given.items("bandwidth_bytes_per_s"))
    ]
    needed = 2 if given.flag("hierarchical") else 1
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
    ids = [node.id for node in nodes]
    index = index_nodes(ids)
    edges = [_edge(each, index, f"edges[{i}]") for i, each in enumerate(profile.items("edges"))]
    check_order(ids, edges)
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
    return _Node(
        id=given.identity("id"),
        description=given.text("desc"),
        compute_ms=given.amount("forward_ms") + given.amount("backward_ms"),
        activation_bytes=given.amount("activation_bytes"),
        parameter_bytes=given.amount("parameter_bytes"),
    )


def _edge(edge: object, index: Mapping[NodeId, int], name: str) -> tuple[int, int]:
    ends = items(edge, name)
    if len(ends) != 2:
        raise PlanError(f"{name} has {len(ends)} entries: give the ids of two nodes")
    return find(ends[0], index, f"{name}[0]"), find(ends[1], index, f"{name}[1]")
