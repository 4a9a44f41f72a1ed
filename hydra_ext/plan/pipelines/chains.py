"""A model as a chain of blocks, with the figures of one size of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydra_ext.errors import PlanError
from hydra_ext.plan.chain import Boundary, Event, SharedParameters


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds that a stage takes for each microbatch beside its events.

    Attributes:
        passing: Of every stage.
        recomputing: More, of a stage that is recomputed.
    """

    passing: float = 0.0
    recomputing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The calls of a model's blocks, in order.

    Attributes:
        samples: Of a microbatch.
        names: Of the blocks.
        events: Their figures for one microbatch.
        boundaries: Between them, one fewer.
        shared: Parameters that several events use.
        working_bytes: For each event, the most bytes in use at once beside what it saves.
        input_bytes: Of a microbatch.
        overheads: Of a stage, however many events it has.
    """

    samples: int
    names: tuple[str, ...]
    events: tuple[Event, ...]
    boundaries: tuple[Boundary, ...]
    shared: tuple[SharedParameters, ...] = ()
    working_bytes: tuple[int, ...] = ()
    input_bytes: int = 0
    overheads: Overheads = Overheads()

    @property
    def possible_cuts(self) -> list[int]:
        return [number for number, boundary in enumerate(self.boundaries, 1) if boundary.possible]

    def crossing_bytes(self, cut: int) -> int:
        return self.boundaries[cut - 1].crossing_bytes

    def weight_bytes(self, begin: int, end: int) -> int:
        """Of the parameters of the events ``begin`` to ``end - 1``, each counted once."""
        alone = sum(event.parameter_bytes for event in self.events[begin:end])
        return alone + sum(each.nbytes for each in self.shared if any(begin <= event < end for event in each.events))


ChainAt = Callable[[int], Chain]
"""Returns the chain for a number of samples of a microbatch."""


def affine(small: Chain, large: Chain) -> ChainAt:
    """Chains of all sizes from those of two: each figure is a part that is fixed, and one that grows with the samples.

    Raises:
        PlanError: The two have other blocks.
    """
    if small.names != large.names or [b.possible for b in small.boundaries] != [b.possible for b in large.boundaries]:
        raise PlanError(
            f"with {small.samples} and with {large.samples} samples fn takes other paths through the model: give "
            "microbatches=, so that only one size is looked at"
        )

    def at(samples: int) -> Chain:
        if samples == small.samples or small.samples == large.samples:
            return replace(small, samples=samples)
        share = (samples - small.samples) / (large.samples - small.samples)

        def number(first: float, second: float) -> float:
            return max(first + share * (second - first), 0.0)

        def count(first: int, second: int) -> int:
            return round(number(first, second))

        return Chain(
            samples=samples,
            names=small.names,
            events=tuple(
                Event(
                    forward_seconds=number(a.forward_seconds, b.forward_seconds),
                    backward_seconds=number(a.backward_seconds, b.backward_seconds),
                    parameter_bytes=a.parameter_bytes,
                    activation_bytes=count(a.activation_bytes, b.activation_bytes),
                )
                for a, b in zip(small.events, large.events, strict=True)
            ),
            boundaries=tuple(
                Boundary(crossing_bytes=count(a.crossing_bytes, b.crossing_bytes), possible=a.possible)
                for a, b in zip(small.boundaries, large.boundaries, strict=True)
            ),
            shared=small.shared,
            working_bytes=tuple(map(count, small.working_bytes, large.working_bytes)),
            input_bytes=count(small.input_bytes, large.input_bytes),
            overheads=small.overheads,
        )

    return at


def measured_at(chains: Sequence[Chain]) -> ChainAt:
    """Chains of the sizes that were measured, and no others."""
    return {chain.samples: chain for chain in chains}.__getitem__
