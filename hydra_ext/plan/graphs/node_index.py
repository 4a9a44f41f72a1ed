"""Nodes of a graph by their ids, as problems name them, and whether its edges form a cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import identity

NodeId = int | str


def index_nodes(ids: Sequence[NodeId]) -> dict[NodeId, int]:
    """The place of each id.

    Raises:
        PlanError: There is none, or one comes twice.
    """
    if not ids:
        raise PlanError("'nodes' is empty: give at least one layer")
    index: dict[NodeId, int] = {}
    for i, each in enumerate(ids):
        if each in index:
            raise PlanError(f"nodes[{i}]['id'] is {each!r}, as nodes[{index[each]}]['id']: give each id once")
        index[each] = i
    return index


def find(value: object, index: Mapping[NodeId, int], name: str) -> int:
    """The place of the node with the id ``value``, which messages call ``name``.

    Raises:
        PlanError: It is no id, or no node has it.
    """
    known = identity(value, name)
    if known not in index:
        raise PlanError(f"{name} is {known!r}, which is no id of a node: give one of the {len(index)} ids")
    return index[known]


def check_order(ids: Sequence[NodeId], edges: Iterable[tuple[int, int]]) -> None:
    """Raises PlanError if the edges, from place to place, form a cycle."""
    missing = [0] * len(ids)
    users: list[list[int]] = [[] for _ in ids]
    for source, target in edges:
        missing[target] += 1
        users[source].append(target)
    ready = [i for i, inputs in enumerate(missing) if not inputs]
    for node in ready:  # grows while it is read
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    if len(ready) < len(ids):
        stuck = next(i for i, inputs in enumerate(missing) if inputs)
        raise PlanError(f"'edges' form a cycle that node {ids[stuck]!r} waits for: give a graph without cycles")
