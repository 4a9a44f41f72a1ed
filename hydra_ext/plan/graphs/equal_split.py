"""Stages of equally many layers, with equally many replicas, all recomputed or none: PipeDream-2BW's plans.

They are the plans that Piper's authors compare with (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): s stages with d
replicas each, where s * d is at most the devices and at most the microbatches of a batch, and d divides the latter.
:mod:`hydra_ext.plan.graphs.layer_graph` has the costs.

In a model with transformer layers, these are counted. Layers before them join the first stage and layers after them the
last, or both form stages of their own. In other models all layers are counted, in the order that the problem gives.
Larger stages come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields
from hydra_ext.plan.graphs.layer_graph import SplitProblem, Way, read
from hydra_ext.plan.graphs.node_index import find
from hydra_ext.plan.solution import Solution
from hydra_ext.plan.width_depth import factors

COUNTED = "ParallelTransformerLayer"

_Stages = list[list[int]]  # indices of layers


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Sums over the layers of a stage, kept and recomputed."""

    crossing_bytes: float
    parameter_bytes: float
    ways: tuple[Way, Way]


def solve(problem: Mapping[str, object]) -> Solution:
    """Tries every plan. The plan is ``[[replicas, [ids], [ids that are recomputed]], ...]`` in pipeline order.

    Raises:
        PlanError: An entry is missing or makes no sense.
    """
    given = Fields(problem, "problem")
    terms = read(given)
    counts = sorted(replicas for replicas, _ in factors(terms.microbatches))
    best: tuple[float, _Stages, int, bool] | None = None
    for division in _divisions(terms, _order(given, terms)):
        stages = _sums(terms, division)
        for replicas in counts:
            if replicas * len(division) > terms.most_replicas:
                break
            for recompute in (False, True):
                time = _time(terms, stages, replicas, recompute)
                if time is not None and (best is None or time < best[0]):
                    best = time, division, replicas, recompute
    if best is None:
        return Solution(objective=None, plan=None, bound=None)
    time, division, replicas, recompute = best
    plan: list[object] = []
    for layers in division:
        ids = [terms.layers[i].id for i in layers]
        plan.append([replicas, ids, list(ids) if recompute else []])
    return Solution(objective=time, plan=plan, bound=time)


def _order(given: Fields, terms: SplitProblem) -> list[int]:
    order = [find(value, terms.index, f"problem['order'][{i}]") for i, value in enumerate(given.items("order"))]
    if sorted(order) != list(range(len(terms.layers))):
        raise PlanError(f"problem['order'] has {len(order)} ids: give each of the {len(terms.layers)} ids once")
    return order


def _divisions(terms: SplitProblem, order: Sequence[int]) -> Iterator[_Stages]:
    """All divisions that keep every layer behind its inputs."""
    counted = [i for i in order if terms.layers[i].name == COUNTED]
    found: Iterator[_Stages] = _around(terms, counted, *_ends(terms, order, counted))
    if not counted:
        found = (_shared_out(order, stages) for stages in range(1, min(len(order), terms.most_replicas) + 1))
    for division in found:
        place = {layer: number for number, layers in enumerate(division) for layer in layers}
        if all(place[edge.source] <= place[edge.target] for edge in terms.edges):
            yield division


def _shared_out(layers: Sequence[int], stages: int) -> _Stages:
    each, larger = divmod(len(layers), stages)
    sizes = [each] * (stages - larger) + [each + 1] * larger
    ends = [sum(sizes[: i + 1]) for i in range(stages)]
    return [list(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _ends(terms: SplitProblem, order: Sequence[int], counted: Sequence[int]) -> tuple[list[int], list[int]]:
    """The layers that a counted one depends on, and all others."""
    inputs: list[list[int]] = [[] for _ in terms.layers]
    for edge in terms.edges:
        inputs[edge.target].append(edge.source)
    before = set(counted)
    waiting = list(counted)
    while waiting:
        new = [source for source in inputs[waiting.pop()] if source not in before]
        before.update(new)
        waiting += new
    counts = set(counted)
    return [i for i in order if i in before and i not in counts], [i for i in order if i not in before]


def _around(
    terms: SplitProblem, counted: Sequence[int], first: Sequence[int], last: Sequence[int]
) -> Iterator[_Stages]:
    ends = [list(layers) for layers in (first, last) if layers]
    for stages in range(1, min(len(counted), terms.most_replicas) + 1):
        groups = _shared_out(counted, stages)
        joined = [list(group) for group in groups]
        joined[0] = [*first, *joined[0]]
        joined[-1] = [*joined[-1], *last]
        yield joined
        if ends and stages + len(ends) <= terms.most_replicas:
            yield [*([list(first)] if first else []), *groups, *([list(last)] if last else [])]


def _sums(terms: SplitProblem, division: _Stages) -> list[_Stage]:
    place = {layer: number for number, layers in enumerate(division) for layer in layers}
    crossing = [0.0] * len(division)
    for edge in terms.edges:
        if place[edge.source] != place[edge.target]:
            crossing[place[edge.source]] += edge.nbytes
            crossing[place[edge.target]] += edge.nbytes
    return [
        _Stage(
            crossing_bytes=crossing[number],
            parameter_bytes=sum(terms.layers[i].parameter_bytes for i in layers),
            ways=(_sum([terms.layers[i].kept for i in layers]), _sum([terms.layers[i].recomputed for i in layers])),
        )
        for number, layers in enumerate(division)
    ]


def _sum(ways: Sequence[Way]) -> Way:
    return Way(
        time=sum(way.time for way in ways),
        bytes_per_microbatch=sum(way.bytes_per_microbatch for way in ways),
        fixed_bytes=sum(way.fixed_bytes for way in ways),
    )


def _time(terms: SplitProblem, stages: Sequence[_Stage], replicas: int, recompute: bool) -> float | None:
    """The slowest stage's time, or None if a stage does not fit."""
    slowest = 0.0
    for number, stage in enumerate(stages):
        way = stage.ways[recompute]
        if way.bytes_per_microbatch * (len(stages) - number) + way.fixed_bytes > terms.memory:
            return None
        communication = terms.communication(
            crossing_bytes=stage.crossing_bytes, parameter_bytes=stage.parameter_bytes, replicas=replicas
        )
        slowest = max(slowest, communication + way.time / replicas)
    return slowest
