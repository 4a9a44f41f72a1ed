"""Width, depth, microbatch size and recomputation of a pipeline of equal blocks, by the cost of PipeDream-2BW's paper.

The cost is that of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 5. A plan
has w pipelines of d stages, microbatches of b samples, and recomputes all activations or none. Bytes of the optimizer
are added to the paper's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, amount, count
from hydra_ext.plan.solution import Solution
from hydra_ext.plan.width_depth import factors

_RECOMPUTED = 4 / 3  # of the time without recomputation: a forward takes half as long as a backward


@dataclass(frozen=True, kw_only=True)
class _Microbatch:
    """A size of microbatches, and what all blocks need for one."""

    samples: int
    seconds: float
    activation_bytes: float
    boundary_bytes: float


@dataclass(frozen=True, kw_only=True)
class _Plan:
    width: int
    depth: int
    microbatch: _Microbatch
    recompute: bool


@dataclass(frozen=True, kw_only=True)
class _Links:
    """Bytes per second inside a server of so many devices, and between servers."""

    server: int
    fast: float
    slow: float

    def between(self, devices: int) -> float:
        return self.fast if devices <= self.server else self.slow


@dataclass(frozen=True, kw_only=True)
class _Problem:
    blocks: int
    devices: int
    batch: int
    microbatches: tuple[_Microbatch, ...]
    weight_bytes: float
    optimizer_bytes: float
    links: _Links
    memory: float

    def plans(self) -> Iterator[_Plan]:
        for width, depth in factors(self.devices):
            if self.blocks % depth:
                continue
            for microbatch in self.microbatches:
                each = width * microbatch.samples
                if self.batch % each == 0 and (depth == 1 or self.batch // each >= depth):
                    for recompute in (False, True):
                        yield _Plan(width=width, depth=depth, microbatch=microbatch, recompute=recompute)

    def nbytes(self, plan: _Plan) -> float:
        versions = 2 if plan.depth > 1 else 1
        activations = plan.microbatch.activation_bytes
        return (
            (versions * self.weight_bytes + self.optimizer_bytes) / plan.depth
            + (activations / plan.depth if plan.recompute else activations)
            + plan.depth * plan.microbatch.boundary_bytes
        )

    def seconds(self, plan: _Plan) -> float:
        """Time of one microbatch on the slowest stage, or its share of the sums over replicas."""
        compute = (_RECOMPUTED if plan.recompute else 1.0) * plan.microbatch.seconds / plan.depth
        crossing = sums = 0.0
        if plan.depth > 1:
            crossing = 2 * plan.microbatch.boundary_bytes / self.links.between(self.devices)
        if plan.width > 1:
            share = 2 * (plan.width - 1) / plan.width
            sums = share * self.weight_bytes / plan.depth / self.links.between(plan.width)
        return max(compute + crossing, sums / (self.batch // (plan.width * plan.microbatch.samples)))


def solve(problem: Mapping[str, object]) -> Solution:
    """Tries every plan. The objective is samples per second; the plan is ``[width, depth, samples, recompute]``.

    Raises:
        PlanError: An entry is missing or makes no sense, or nothing takes any time.
    """
    terms = _read(Fields(problem, "problem"))
    best, fastest = None, 0.0
    for plan in terms.plans():
        if terms.nbytes(plan) > terms.memory:
            continue
        seconds = terms.seconds(plan)
        throughput = plan.width * plan.microbatch.samples / seconds if seconds else math.inf
        if math.isinf(throughput):
            raise PlanError("problem['block_time_s'] and all transfers take no time: give the seconds of a block")
        if throughput > fastest:
            best, fastest = plan, throughput
    if best is None:
        return Solution(objective=None, plan=None, bound=None)
    return Solution(
        objective=fastest,
        plan=[best.width, best.depth, best.microbatch.samples, best.recompute],
        bound=fastest,
    )


def _read(given: Fields) -> _Problem:
    blocks = given.count("num_blocks")
    sizes = [count(size, f"problem['microbatch_sizes'][{i}]") for i, size in enumerate(given.items("microbatch_sizes"))]
    seconds, activations, boundaries = (
        _amounts(given, key, len(sizes))
        for key in ("block_time_s", "block_activation_bytes", "boundary_activation_bytes")
    )
    return _Problem(
        blocks=blocks,
        devices=given.count("devices"),
        batch=given.count("global_batch"),
        microbatches=tuple(
            _Microbatch(
                samples=size,
                seconds=blocks * seconds[i],
                activation_bytes=blocks * activations[i],
                boundary_bytes=boundaries[i],
            )
            for i, size in enumerate(sizes)
        ),
        weight_bytes=blocks * given.amount("block_weight_bytes"),
        optimizer_bytes=blocks * given.amount("block_optimizer_bytes"),
        links=_Links(
            server=given.count("gpus_per_server"), fast=given.positive("bw_high"), slow=given.positive("bw_low")
        ),
        memory=given.amount("device_memory_bytes"),
    )


def _amounts(given: Fields, key: str, length: int) -> list[float]:
    found = [amount(value, f"problem['{key}'][{i}]") for i, value in enumerate(given.items(key))]
    if len(found) != length:
        raise PlanError(
            f"problem['{key}'] has {len(found)} entries, 'microbatch_sizes' {length}: give one for each size"
        )
    return found
