"""A model as a chain of events, cut into the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hydra_ext import _C
from hydra_ext.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Event:
    """The n-th call of a block, for one microbatch.

    Attributes:
        parameter_bytes: of parameters that no other event uses; what a version of them takes.
        activation_bytes: that are kept from its forward to its backward.
    """

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Between an event and the next.

    Attributes:
        crossing_bytes: of the values that cross it for one microbatch; as many of gradients come back.
        possible: whether a cut may be here.
    """

    crossing_bytes: int = 0
    possible: bool = True


@dataclass(frozen=True, kw_only=True)
class SharedParameters:
    """Parameters that several events use: each stage that has one of these holds them."""

    nbytes: int
    events: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Events ``begin`` to ``end - 1``.

    Attributes:
        seconds: for one microbatch: the sum of the two above, or the larger of them where they overlap.
        nbytes: versions * parameters + microbatches in flight * activations.
    """

    begin: int
    end: int
    compute_seconds: float
    communication_seconds: float
    seconds: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A chain in stages.

    Attributes:
        period_seconds: of the slowest stage: what a full pipeline takes for a microbatch.
        crossing_bytes: at all cuts together, for one microbatch in one direction.
    """

    stages: tuple[Stage, ...]
    period_seconds: float
    crossing_bytes: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first event of every stage but the first."""
        return tuple(stage.begin for stage in self.stages[1:])


def partition_chain(
    events: Iterable[Event],
    boundaries: Iterable[Boundary],
    *,
    stages: int,
    shared: Iterable[SharedParameters] = (),
    bandwidth: float = math.inf,
    latency: float = 0.0,
    overlapped: bool = False,
    versions: int = 1,
    memory: int | Sequence[int | None] | None = None,
) -> Partition:
    """The division into ``stages`` stages whose slowest one is fastest: exact, in O(events² stages).

    Among equals (to one part in 10^12) the one with the fewest crossing bytes, then the most even one.

    A stage takes its events' forward and backward and, for each of its one or two boundaries, twice
    ``latency + crossing_bytes / bandwidth``, once in each direction (as PipeDream-2BW's planner; Narayanan et al.,
    2021, section 5). It holds ``versions`` of its parameters and, stage s of S, the activations of S - s microbatches,
    as 1F1B and 2BW do.

    Args:
        boundaries: one less than events; the n-th is before event n + 1.
        bandwidth: bytes a second between two stages, in each direction.
        latency: seconds.
        overlapped: computing and communicating go on at the same time.
        memory: bytes that a stage may hold: one number for all, or one for each, first to last; None for any number.

    Raises:
        PlanDoesNotFit: the memory allows no division; names the stage that lacks most, and what it needs.
        PlanError: more stages than the possible cuts allow; negative numbers; numbers that do not go together.
        InvalidArgument: ``memory`` does not have one entry for each stage.
    """
    if memory is None or isinstance(memory, int):
        limits: list[int | None] = [memory] * stages
    elif len(memory) == stages:
        limits = list(memory)
    else:
        raise InvalidArgument(
            f"partition_chain(memory={memory!r}): one entry for each of the {stages} stages is needed"
        )
    found = _C.partition_chain(
        [(one.forward_seconds, one.backward_seconds, one.parameter_bytes, one.activation_bytes) for one in events],
        [(one.crossing_bytes, one.possible) for one in boundaries],
        [(one.nbytes, list(one.events)) for one in shared],
        bandwidth=bandwidth,
        latency=latency,
        overlapped=overlapped,
        versions=versions,
        limits=limits,
    )
    return _named(found)


def _named(found: _C.ChainPartition) -> Partition:
    stages = tuple(
        Stage(
            begin=stage.begin,
            end=stage.end,
            compute_seconds=stage.compute_seconds,
            communication_seconds=stage.communication_seconds,
            seconds=stage.seconds,
            nbytes=stage.bytes,
        )
        for stage in found.stages
    )
    return Partition(stages=stages, period_seconds=found.period_seconds, crossing_bytes=found.crossing_bytes)
