"""Stages of any size, each with its own replicas and its own recomputed layers: Piper without tensor parallelism.

:mod:`hydra_ext.plan.graphs.layer_graph` has the costs. The search (csrc/plan/unequal_split.h) is exact if the graph has
at most 40,000 sets of layers with all their inputs. For others it gives the best plan of some sets, and a bound that no
plan beats. Then more memory may give a slower plan; and if none of these plans fits, there is neither plan nor bound,
though another plan may fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from hydra_ext import _C
from hydra_ext.plan.fields import Fields
from hydra_ext.plan.graphs.layer_graph import Way, read
from hydra_ext.plan.solution import Solution


def solve(problem: Mapping[str, object]) -> Solution:
    """Finds stages. The plan is ``[[replicas, [ids], [ids that are recomputed]], ...]`` in pipeline order.

    A stage is any set of layers such that all inputs come from it or from earlier ones. Its replicas divide the
    microbatches of a batch. All replicas are at most the devices, and at most the microbatches.

    Raises:
        PlanError: An entry is missing or makes no sense.
    """
    terms = read(Fields(problem, "problem"))
    stages, time, bound = _C.split_unequally(
        [(_values(layer.kept), _values(layer.recomputed), layer.parameter_bytes) for layer in terms.layers],
        [(edge.source, edge.target, edge.nbytes) for edge in terms.edges],
        memory=terms.memory,
        bandwidth=terms.bandwidth,
        devices=terms.devices,
        microbatches=terms.microbatches,
    )
    if not stages:
        return Solution(objective=None, plan=None, bound=None)
    ids = [layer.id for layer in terms.layers]
    plan: list[object] = [
        [replicas, [ids[i] for i in layers], [ids[i] for i in recomputed]] for replicas, layers, recomputed in stages
    ]
    return Solution(objective=time, plan=plan, bound=bound)


def _values(way: Way) -> tuple[float, float, float]:
    return way.time, way.bytes_per_microbatch, way.fixed_bytes
