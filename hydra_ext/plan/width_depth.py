"""Width and depth of a pipeline of equal blocks, by the cost of PipeDream-2BW's published planner.

The planner searches w pipelines of d stages each, with w * d workers, for the least time per microbatch (Narayanan et
al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021). A stage has k = floor(blocks / d) blocks:

    cost = max(time * k, 2 * output / 1e9, 2 * (w - 1) * parameters * k / bandwidth) / w

Bandwidth is 1e11 for at most 8 replicas, else 1e9. Memory is 4 * (2 * parameters * k + activations * k * d), where k
becomes floor((blocks + d) / d) if there are fewer blocks than stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hydra_ext.plan.fields import Fields
from hydra_ext.plan.solution import Solution

_LINK = 1e9
_FAST_SUMS, _SLOW_SUMS = 1e11, 1e9
_FASTEST_WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class _Problem:
    blocks: int
    workers: int
    memory: float
    block_seconds: float
    block_parameters: float
    block_activations: float
    output: float

    def seconds(self, width: int, depth: int) -> float:
        """Time per microbatch."""
        blocks = self.blocks // depth
        sums = _FAST_SUMS if width <= _FASTEST_WIDTH else _SLOW_SUMS
        return (
            max(
                self.block_seconds * blocks,
                2 * self.output / _LINK,
                2 * (width - 1) * self.block_parameters * blocks / sums,
            )
            / width
        )

    def nbytes(self, depth: int) -> float:
        blocks = self.blocks // depth if self.blocks >= depth else (self.blocks + depth) // depth
        return 4 * (2 * self.block_parameters * blocks + self.block_activations * blocks * depth)


def solve(problem: Mapping[str, object]) -> Solution:
    """Tries every width and depth. The plan is ``[width, depth]``; among equals the narrowest is taken.

    Raises:
        PlanError: An entry is missing or makes no sense.
    """
    given = Fields(problem, "problem")
    terms = _Problem(
        blocks=given.count("num_blocks"),
        workers=given.count("num_workers"),
        memory=given.amount("memory_capacity"),
        block_seconds=given.amount("computation_time_per_block"),
        block_parameters=given.amount("num_parameters_per_block"),
        block_activations=given.amount("num_activations_per_block"),
        output=given.amount("output_activation_size"),
    )
    fitting = [
        (terms.seconds(width, depth), width, depth)
        for width, depth in factors(terms.workers)
        if terms.nbytes(depth) <= terms.memory
    ]
    if not fitting:
        return Solution(objective=None, plan=None, bound=None)
    seconds, width, depth = min(fitting)
    return Solution(objective=seconds, plan=[width, depth], bound=seconds)


def factors(number: int) -> Iterator[tuple[int, int]]:
    """All pairs whose product is the number."""
    first = 1
    while first * first <= number:
        if number % first == 0:
            yield first, number // first
            if first * first < number:
                yield number // first, first
        first += 1
