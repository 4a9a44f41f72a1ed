"""What one rank of a pipeline holds and has done, in one documented schema: as an object, a dict and a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra_ext.notebooks import Bar, html_of, seconds_said
from hydra_ext.pipeline.engine import Engine
from hydra_ext.pipeline.microbatches import OwnStage
from hydra_ext.pipeline.ranks.links import Inbox, Outbox
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.stages.parts import Part, Parts
from hydra_ext.pipeline.tally import RECENT, Tally
from hydra_ext.runtime.reporting.report import Report
from hydra_ext.schedule import Schedule
from hydra_ext.schedule.meaning import delay_of, meaning_of
from hydra_ext.split import SplitStage

_NAMED_BLOCKS = 4  # names of a stage's blocks in the text


@dataclass(frozen=True)
class StageReport:
    """One stage of this rank.

    Attributes:
        stage: The stage's number.
        blocks: Names of the blocks that the stage calls, in their order. Empty for a stage that was given as a module.
        parameter_bytes: Bytes of the stage's parameters, each counted once, frozen ones included.
        shared_bytes: Bytes of those parameters that other stages train too.
        version_bytes: Bytes of all versions of the trained parameters that have memory, the newest included.
        peak_in_flight: Largest number of microbatches between their forward and their backward.
    """

    stage: int
    blocks: tuple[str, ...]
    parameter_bytes: int
    shared_bytes: int
    version_bytes: int
    peak_in_flight: int

    def __str__(self) -> str:
        return (
            f"stage {self.stage}: {_blocks(self.blocks)}parameters {_mib(self.parameter_bytes)}"
            + (f", {_mib(self.shared_bytes)} of them on other stages too" if self.shared_bytes else "")
            + f"; versions {_mib(self.version_bytes)}; microbatches in flight at most {self.peak_in_flight}"
        )


@dataclass(frozen=True)
class PipelineReport:
    """Time and event counts of one rank since it started.

    Bytes count tensors; times are seconds of the host's clock.

    Attributes:
        rank: This rank, one of ``ranks``.
        place: The rank's place in its line of ``places`` ranks, which hold the model together.
        replica: The rank's line, one of ``replicas``.
        schedule: The schedule's kind; None for a user's own schedule.
        delay: Largest number of updates by which a gradient is late, over all stages. 0 means the numbers of plain
            training.
        stages: This rank's stages. Empty before a plain module was split.
        steps: Number of steps.
        updates: Number of updates that this rank has made. With a delay some may still be pending.
        updates_behind: Number of these updates that ran behind other microbatches' forwards and backwards.
        skipped_updates: Number of updates that were left out because the norm of their gradients was not finite.
        activations_sent_bytes, activations_received_bytes: Bytes sent to the next stages' ranks, and received from the
            ranks of the stages before.
        gradients_sent_bytes, gradients_received_bytes: Bytes sent to the ranks of the stages before, and received from
            the next stages' ranks.
        computing_seconds: Seconds in forwards, backwards and updates; without waits, and without updates behind other
            actions. On a GPU an action counts until it is enqueued.
        waited_for_activations_seconds, waited_for_gradients_seconds: Seconds in which forwards and backwards waited for
            other stages.
        waited_for_reductions_seconds: Seconds in which updates waited for sums of gradients over ranks, and for their
            norm.
        waited_for_losses_seconds: Seconds in which readers of a loss waited for the rank that computes it.
        bubble: Fraction of the last ``RECENT`` steps, drains and evaluations, with the waits for their losses, in which
            this rank computed nothing. The program's own time between two steps does not count.
        device: What a rank with a ``budget=`` has held on its device, and moved to and from it; None without a budget.
    """

    rank: int
    ranks: int
    place: int
    places: int
    replica: int
    replicas: int
    schedule: str | None
    delay: int
    stages: tuple[StageReport, ...]
    steps: int
    updates: int
    updates_behind: int
    skipped_updates: int
    activations_sent_bytes: int
    activations_received_bytes: int
    gradients_sent_bytes: int
    gradients_received_bytes: int
    computing_seconds: float
    waited_for_activations_seconds: float
    waited_for_gradients_seconds: float
    waited_for_reductions_seconds: float
    waited_for_losses_seconds: float
    bubble: float
    device: Report | None = None

    @property
    def approximate(self) -> bool:
        """Whether the numbers differ from those of plain training."""
        return self.delay > 0

    @property
    def parameter_bytes(self) -> int:
        return sum(stage.parameter_bytes for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"rank     {self.rank} of {self.ranks}: place {self.place} of {self.places} in replica {self.replica} of "
            f"{self.replicas}",
            f"schedule {self.schedule or 'of its own'}: {meaning_of(self.delay)}",
            *(f"holds    {stage}" for stage in self.stages or ("nothing yet: the first step splits the model",)),
            f"steps    {self.steps}; {self.updates} updates, {self.updates_behind} of them behind other microbatches, "
            f"{self.skipped_updates} more skipped",
            f"moved    activations: sent {_mib(self.activations_sent_bytes)}, received "
            f"{_mib(self.activations_received_bytes)}; gradients: sent {_mib(self.gradients_sent_bytes)}, received "
            f"{_mib(self.gradients_received_bytes)}",
            f"time     computing {self.computing_seconds:.3f} s; waited for activations "
            f"{self.waited_for_activations_seconds:.3f} s, gradients {self.waited_for_gradients_seconds:.3f} s, "
            f"reductions {self.waited_for_reductions_seconds:.3f} s, losses {self.waited_for_losses_seconds:.3f} s; "
            f"bubble {self.bubble:.1%} of the last {min(self.steps, RECENT)} steps",
        ]
        if self.device is not None:
            lines.append(str(self.device))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        time = {
            "computing": self.computing_seconds,
            "waiting for activations": self.waited_for_activations_seconds,
            "waiting for gradients": self.waited_for_gradients_seconds,
            "waiting for reductions": self.waited_for_reductions_seconds,
            "waiting for losses": self.waited_for_losses_seconds,
        }
        return html_of(str(self), Bar("time of this rank", time, seconds_said))


def make_report(schedule: Schedule, topology: Topology, engine: Engine | None) -> PipelineReport:
    """Makes a rank's report; ``engine`` is None before the model is cut."""
    own = [] if engine is None else engine.assembly.stages
    tally = Tally(()) if engine is None else engine.executor.tally
    waited = tally.waited_seconds
    return PipelineReport(
        rank=topology.rank,
        ranks=topology.world,
        place=topology.place,
        places=topology.places,
        replica=topology.replica,
        replicas=topology.replicas,
        schedule=schedule.kind,
        delay=delay_of(schedule),
        stages=() if engine is None else _stages(own, engine.assembly.parts, tally),
        steps=0 if engine is None else engine.batches,
        updates=tally.updates,
        updates_behind=tally.updates_behind,
        skipped_updates=tally.skipped_updates,
        activations_sent_bytes=_sent(stage.links.outbox for stage in own),
        activations_received_bytes=_received(stage.links.inbox for stage in own),
        gradients_sent_bytes=_sent(stage.links.gradient_outbox for stage in own),
        gradients_received_bytes=_received(stage.links.gradient_inbox for stage in own),
        computing_seconds=tally.computing_seconds,
        waited_for_activations_seconds=waited["activations"],
        waited_for_gradients_seconds=waited["gradients"],
        waited_for_reductions_seconds=waited["reductions"],
        waited_for_losses_seconds=waited["losses"],
        bubble=tally.bubble,
        device=None if engine is None or engine.assembly.tier is None else engine.assembly.tier.report(),
    )


def _stages(own: Sequence[OwnStage], parts: Parts, tally: Tally) -> tuple[StageReport, ...]:
    return tuple(
        StageReport(
            stage=part.stage,
            blocks=part.program.events if isinstance(part.program, SplitStage) else (),
            parameter_bytes=sum(parameter.nbytes for _, parameter in part.parameters),
            shared_bytes=_shared_bytes(part, parts),
            version_bytes=stage.weights.nbytes,
            peak_in_flight=tally.peak_in_flight[part.stage],
        )
        for stage, part in zip(own, parts.own, strict=True)
    )


def _shared_bytes(part: Part, parts: Parts) -> int:
    indices = [weight[part.stage] for weight in parts.shared if part.stage in weight]
    return sum(part.trained[index][1].nbytes for index in indices if index is not None)


def _sent(links: Iterable[Outbox | None]) -> int:
    return sum(link.sent_bytes for link in links if link is not None)


def _received(links: Iterable[Inbox | None]) -> int:
    return sum(link.received_bytes for link in links if link is not None)


def _blocks(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = names if len(names) <= _NAMED_BLOCKS else [*names[: _NAMED_BLOCKS - 2], "...", names[-1]]
    return f"{', '.join(shown)}; "


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
