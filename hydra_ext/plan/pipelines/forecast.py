"""What a planned pipeline looks like: plain values, and the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_ext.notebooks import Bar, html_of, seconds_said, size_said
from hydra_ext.plan.pipelines.question import PipelineChoice

_SHOWN = 8  # alternatives in the table


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A part of the model on one rank of each line.

    Attributes:
        rank: Of a line.
        begin: Number of its first event: a call of a block.
        names: The blocks that are called, in order.
        forward_seconds: Of a microbatch.
        backward_seconds: Of a microbatch, a second forward included.
        weight_bytes: Of one version of the weights.
        nbytes: Device bytes, of all that the stage holds.
    """

    rank: int
    begin: int
    names: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    weight_bytes: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PipelineAlternative:
    """A choice that was judged.

    Attributes:
        choice: The choice.
        seconds: Of a step.
        nbytes: Device bytes of the rank that needs the most.
        cuts: The events at which the stages after the first begin.
        fits: Whether the bytes are within the budget.
    """

    choice: PipelineChoice
    seconds: float
    nbytes: int
    cuts: tuple[int, ...]
    fits: bool


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The fastest way to train a model on several devices that was found. ``str()`` gives a table.

    Attributes:
        choice: Width, depth, size and number of microbatches, schedule, and whether to recompute.
        seconds: Of a step.
        stages: In the model's order.
        rank_bytes: Device bytes of each rank of a line.
        budget: Device bytes that a rank may take; None for no limit.
        lanes: Seconds of a step in which each thing is busy, on the rank or hop where it is so the longest.
        alternatives: Each choice that was judged with its best cuts, those that fit first, the fastest first.
        measured_because: Why real microbatches gave the figures, and not dry runs; None if that was not needed.
    """

    choice: PipelineChoice
    seconds: float
    stages: tuple[PlannedStage, ...]
    rank_bytes: tuple[int, ...]
    budget: int | None
    lanes: Mapping[str, float]
    alternatives: tuple[PipelineAlternative, ...]
    measured_because: str | None = None

    @property
    def cuts(self) -> tuple[int, ...]:
        """The events at which the stages after the first begin, as ``Pipeline(cuts=)`` takes them."""
        return tuple(stage.begin for stage in self.stages[1:])

    @property
    def binding(self) -> str:
        """The lane that takes the most of a step."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._table(), "", *self._others()])

    def _repr_html_(self) -> str:
        ranks = {f"rank {rank}": size for rank, size in enumerate(self.rank_bytes)}
        return html_of(str(self), Bar("memory of the ranks", ranks, size_said), Bar("busy", self.lanes, seconds_said))

    def _head(self) -> list[str]:
        lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.lanes.items())
        budget = "no budget" if self.budget is None else f"budget {_size(self.budget)}"
        head = [
            f"{self.seconds:.3g} s a step: {_words(self.choice)}",
            f"busy: {lanes}; {self.binding} binds",
            f"memory of a rank: at most {_size(max(self.rank_bytes))}; {budget}",
        ]
        if self.measured_because is not None:
            head.append(f"from real microbatches, as a dry run has no numbers: {self.measured_because}")
        return head

    def _table(self) -> list[str]:
        rows = [("stage", "rank", "blocks", "forward", "backward", "weights", "memory")]
        for number, stage in enumerate(self.stages):
            last = f" to {stage.names[-1]}" if len(stage.names) > 1 else ""
            rows.append(
                (
                    str(number),
                    str(stage.rank),
                    stage.names[0] + last,
                    f"{1000 * stage.forward_seconds:.3g} ms",
                    f"{1000 * stage.backward_seconds:.3g} ms",
                    _size(stage.weight_bytes),
                    _size(stage.nbytes),
                )
            )
        return _aligned(rows)

    def _others(self) -> list[str]:
        rows = [("seconds", "width", "depth", "samples", "schedule", "recompute", "memory")]
        rows += [
            (
                f"{each.seconds:.3g}",
                str(each.choice.width),
                str(each.choice.depth),
                f"{each.choice.microbatches} x {each.choice.samples}",
                each.choice.schedule,
                "yes" if each.choice.recompute else "no",
                _size(each.nbytes) + ("" if each.fits else ", too much"),
            )
            for each in self.alternatives[:_SHOWN]
        ]
        return [f"{len(self.alternatives)} choices, the best:", *_aligned(rows)]


def _words(choice: PipelineChoice) -> str:
    lines = f"{choice.width} line{'s' * (choice.width > 1)} of {choice.depth} rank{'s' * (choice.depth > 1)}"
    again = ", recomputed" if choice.recompute else ""
    return f"{lines}, {choice.schedule}, {choice.microbatches} microbatches of {choice.samples}{again}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
