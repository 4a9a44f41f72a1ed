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
        forward_seconds: Time of the forward.
        backward_seconds: Time of the backward.
        parameter_bytes: Bytes of one version of the parameters that no other event uses.
        activation_bytes: Bytes that are kept from the forward to the backward.
    """

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The place between an event and the next.

    Attributes:
        crossing_bytes: Bytes of the values that cross it for one microbatch. As many bytes of gradients come back.
        possible: Whether a cut may be here.
    """

    crossing_bytes: int = 0
    possible: bool = True


@dataclass(frozen=True, kw_only=True)
class SharedParameters:
    """Parameters that several events use. Each stage that has one of these events holds them."""

    nbytes: int
    events: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The events ``begin`` to ``end - 1``.

    Attributes:
        compute_seconds: Time of forward and backward for one microbatch.
        communication_seconds: Time of the crossings for one microbatch.
        seconds: Sum of the two, or the larger one if they overlap.
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
        stages: Stages in order.
        period_seconds: Time of the slowest stage: a full pipeline takes it for each microbatch.
        crossing_bytes: Bytes at all cuts together, for one microbatch in one direction.
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
    """Divides a chain into ``stages`` stages so that the slowest one is as fast as possible.

    The result is exact, in O(events² stages). Among equals (to one part in 10^12) the one with the fewest crossing
    bytes is taken, then the most even one.

    A stage takes the time of its events' forward and backward. Each of its one or two boundaries adds twice
    ``latency + crossing_bytes / bandwidth``, once in each direction (as PipeDream-2BW's planner; Narayanan et al.,
    2021, section 5). It holds ``versions`` of its parameters. As in 1F1B and 2BW, stage s of S holds the activations of
    S - s microbatches.

    Args:
        events: Events of the chain, in order.
        boundaries: Boundaries between events, one fewer than these; the n-th is before event n + 1.
        stages: Number of stages.
        shared: Parameters that several events use.
        bandwidth: Bytes a second between two stages, in each direction.
        latency: Seconds from one stage to the next.
        overlapped: Whether computing and communicating go on at the same time.
        versions: Number of copies of the weights that a stage holds.
        memory: Bytes that a stage may hold: one number for all, or one for each stage in order. None for no limit.

    Raises:
        PlanDoesNotFit: The memory allows no division. Names the stage that lacks the most, and the bytes that it needs.
        PlanError: There are fewer possible cuts than the stages need, or negative numbers, or numbers that do not fit
            together.
        InvalidArgument: ``memory`` does not have one entry for each stage.
    """
    if memory is None or isinstance(memory, int):
        limits: list[int | None] = [memory] * stages
    elif len(memory) == stages:
        limits = list(memory)
    else:
        raise InvalidArgument(f"partition_chain(memory={memory!r}): give one entry for each of the {stages} stages")
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
