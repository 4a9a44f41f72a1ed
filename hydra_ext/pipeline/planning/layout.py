"""What a user gives of a pipeline's layout, and the layout that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra_ext.errors import InvalidArgument
from hydra_ext.pipeline.batch import as_microbatches
from hydra_ext.pipeline.choices import check_schedule
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.schedule import Schedule, make

_MICROBATCHES = 8
Cuts = Sequence[str | int]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user gives. None is the default, or with a plan what the plan chooses."""

    schedule: str | Schedule
    microbatches: int | None
    stages: int | None
    cuts: Cuts | None
    replicas: int | None
    recompute: bool | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a pipeline is laid out over its ranks.

    Attributes:
        microbatches: Of a step, in each line.
        cuts: Blocks or events at which the stages after the first begin; None to choose them.
        shares: Whether every line gets the whole batch and takes its own share.
    """

    topology: Topology
    schedule: Schedule
    microbatches: int
    recompute: bool
    cuts: Cuts | None
    shares: bool = False

    def works(self, batch: Any) -> list[Any]:
        """This line's microbatches of a step.

        Raises:
            InvalidArgument: The batch cannot be cut into them.
        """
        if not self.shares:
            return as_microbatches(batch, self.microbatches)
        lines = self.topology.replicas
        works = as_microbatches(batch, lines * self.microbatches)
        if len(works) % lines:
            raise InvalidArgument(
                f"{len(works)} microbatches for {lines} lines of ranks: each takes as many, so give a multiple"
            )
        each = len(works) // lines
        return works[self.topology.replica * each :][:each]


def given_layout(given: Given, modules: int) -> Layout:
    """The layout without a plan.

    Args:
        given: What the user gives.
        modules: The number of stages that were given as modules; 0 for a model.

    Raises:
        InvalidArgument: The numbers do not fit the ranks.
        InvalidSchedule: There is no such schedule.
    """
    topology = Topology.here(1 if given.replicas is None else given.replicas)
    stages = modules or (topology.places if given.stages is None else given.stages)
    microbatches = _MICROBATCHES if given.microbatches is None else given.microbatches
    schedule = given.schedule
    if not isinstance(schedule, Schedule):
        schedule = make(schedule, stages=stages, ranks=topology.places, microbatches=microbatches)
    check_schedule(schedule, stages, topology)
    return Layout(
        topology=topology,
        schedule=schedule,
        microbatches=microbatches,
        recompute=bool(given.recompute),
        cuts=given.cuts,
    )
