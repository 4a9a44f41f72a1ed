"""A model as a graph of layers that is cut into stages, as the published inputs of Piper have it.

A stage with d replicas takes, for one microbatch,

    (2 * bytes of edges with one end in it / d + 4 * (d - 1) / d * parameter bytes / microbatches) / bandwidth
      + times of its layers / d

Its layers hold mem_a * y + mem_b bytes, where y = ceil(replicas in this and all later stages / d) microbatches are
between their forward and their backward. The unit of time is that of the layers. (Tarnawski, Narayanan, Phanishayee,
"Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, amount, items
from hydra_ext.plan.graphs.node_index import NodeId, check_order, find, index_nodes


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a layer takes if its activations are kept, or if it is recomputed.

    Attributes:
        time: Time of forward and backward for one microbatch.
        bytes_per_microbatch: Bytes for each microbatch in flight.
        fixed_bytes: Bytes on top.
    """

    time: float
    bytes_per_microbatch: float
    fixed_bytes: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A node of the graph.

    Attributes:
        id: What plans call it.
        name: Its kind, as the model has it.
        parameter_bytes: Bytes that replicas sum after each batch.
        kept: Costs if its activations are kept.
        recomputed: Costs if its forward runs again before its backward.
    """

    id: NodeId
    name: str
    parameter_bytes: float
    kept: Way
    recomputed: Way


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A value that one layer makes and another one uses.

    Attributes:
        source: Index of the first layer.
        target: Index of the second.
        nbytes: Bytes of the value for one microbatch.
    """

    source: int
    target: int
    nbytes: float


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """A graph, and the devices that its stages run on.

    Attributes:
        layers: Layers in the order of the input.
        edges: Values between them. They form no cycle.
        index: Index of each layer by its id.
        memory: Bytes of a device.
        devices: Number of devices.
        microbatches: Number of microbatches in a batch.
        bandwidth: Bytes per unit of time between devices.
    """

    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    index: Mapping[NodeId, int]
    memory: float
    devices: int
    microbatches: int
    bandwidth: float

    @property
    def most_replicas(self) -> int:
        """What all stages have together, at most."""
        return min(self.devices, self.microbatches)

    def communication(self, *, crossing_bytes: float, parameter_bytes: float, replicas: int) -> float:
        """The time of a stage's transfers for one microbatch."""
        sums = 4 * (replicas - 1) / replicas * parameter_bytes / self.microbatches
        return (2 * crossing_bytes / replicas + sums) / self.bandwidth


def read(given: Fields) -> SplitProblem:
    """Reads a problem of kind ``equal_split`` or ``unequal_split``.

    Raises:
        PlanError: An entry is missing or makes no sense, or the edges form a cycle.
    """
    model = given.fields("model")
    layers = tuple(_layer(node, f"nodes[{i}]") for i, node in enumerate(model.items("nodes")))
    ids = [layer.id for layer in layers]
    index = index_nodes(ids)
    edges = tuple(_edge(edge, index, f"edges[{i}]") for i, edge in enumerate(model.items("edges")))
    check_order(ids, [(edge.source, edge.target) for edge in edges])
    return SplitProblem(
        layers=layers,
        edges=edges,
        index=index,
        memory=given.amount("memory_bytes"),
        devices=given.count("devices"),
        microbatches=given.count("microbatches_per_batch"),
        bandwidth=given.positive("bandwidth_bytes_per_s"),
    )


def _layer(node: object, name: str) -> Layer:
    given = Fields(node, name)
    return Layer(
        id=given.identity("id"),
        name=given.text("name"),
        parameter_bytes=given.amount("parameter_bytes"),
        kept=_way(given.fields("vanilla")),
        recomputed=_way(given.fields("recompute")),
    )


def _way(given: Fields) -> Way:
    return Way(
        time=given.amount("time"),
        bytes_per_microbatch=given.amount("mem_a"),
        fixed_bytes=given.amount("mem_b"),
    )


def _edge(edge: object, index: Mapping[NodeId, int], name: str) -> Edge:
    parts = items(edge, name)
    if len(parts) != 3:
        raise PlanError(f"{name} has {len(parts)} entries: give two ids and the bytes between them")
    return Edge(
        source=find(parts[0], index, f"{name}[0]"),
        target=find(parts[1], index, f"{name}[1]"),
        nbytes=amount(parts[2], f"{name}[2]"),
    )
