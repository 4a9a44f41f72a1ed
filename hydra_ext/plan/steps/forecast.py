"""What a planned step looks like: plain values, and the table that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hydra_ext.notebooks import Bar, html_of, seconds_said, size_said
from hydra_ext.plan.steps.memory import MemoryPoint
from hydra_ext.plan.steps.timeline import StepTimeline, TreatedStep

_BAR = 24  # characters of the longest bar


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """What becomes of what one segment saves for backward.

    Attributes:
        name: The module, or children of an ``nn.Sequential``, from the first up to and without the end, such as
            ``features.[0:5]``.
        choice: ``keep``, ``offload``, ``recompute``, ``recompute, inputs offloaded``, or ``compress``;
            ``recompute in pieces``, where the second forward drops again what modules inside save.
        why: The choice's price beside another one's.
        saved_bytes: Of one microbatch, that no earlier segment has saved.
        kept_bytes: Of one microbatch, that stay on the device.
        moved_bytes: Of one microbatch, that leave and come back.
        seconds: Of compute in a step.
    """

    name: str
    choice: str
    why: str
    saved_bytes: int
    kept_bytes: int
    moved_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that would make a step faster, and the seconds that it would take then."""

    change: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What ran as it was planned.

    Attributes:
        seconds: Of the fastest step; None before one was timed.
        peak_bytes: The most bytes of the device in use, in the last step.
    """

    seconds: float | None
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training step runs under a budget. ``str()`` gives a table.

    Attributes:
        least_bytes: The smallest budget that any plan fits.
        ideal_bytes: The budget with which all activations of a step stay, and all weights.
        peak_bytes: The most bytes that the step needs at once.
        host_bytes: Of weights, gradients, optimizer state and activations on the host, without working memory. In a
            running step without the optimizer's state; with ``host_budget=`` all that this counts.
        disk_bytes: Of what exceeds the host's budget; in a running step of activations.
        seconds: Of a step.
        lanes: Seconds in which compute, each direction of the link, and the optimizer are busy.
        segments: In the order of their calls.
        curve: Budgets, and the seconds of a step with each.
        advice: What would help, the best first.
        measured: Of steps that ran so; None before.
        measured_because: Why a real microbatch gave the figures, and not a dry run; None if that was not needed.
    """

    least_bytes: int
    ideal_bytes: int
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    seconds: float
    lanes: Mapping[str, float]
    segments: tuple[PlannedSegment, ...]
    curve: tuple[tuple[int, float], ...]
    advice: tuple[Advice, ...]
    measured: MeasuredStep | None = None
    measured_because: str | None = None
    _step: TreatedStep = field(repr=False)

    @property
    def budget(self) -> int:
        """Device bytes."""
        return self._step.budget

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self._step.setting.microbatches

    @property
    def round_size(self) -> int:
        """Microbatches that run together; 1 for one after the other."""
        return self._step.round_size

    @property
    def stash_bytes(self) -> int:
        """Room for activations on their way."""
        return self._step.stash_bytes

    @property
    def heads_in_rows(self) -> tuple[str, ...]:
        """Linear layers whose logits are made, and go backward, some rows at a time."""
        return self._step.heads_in_rows

    @property
    def held_bytes(self) -> int:
        """The most bytes in use: with weights that stay because there is room, and blocks at home on the device.

        A measured peak is to be compared with this.
        """
        return self._step.held_bytes()

    @property
    def memory(self) -> tuple[MemoryPoint, ...]:
        """Device bytes over a round: forward, then backward."""
        return self._step.memory()

    def timeline(self) -> StepTimeline:
        """What compute and each direction of the link do when, and the memory beside it: simulates the step again."""
        return self._step.timeline()

    @property
    def binding(self) -> str:
        """The lane that is busy the longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._table(), "", *self._curve_lines()])

    def _repr_html_(self) -> str:
        return html_of(
            str(self),
            Bar("device memory", {"needed at once": self.peak_bytes}, size_said, whole=self.budget),
            Bar("busy in a step", self.lanes, seconds_said),
        )

    def _head(self) -> list[str]:
        lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.lanes.items())
        advice = [f"{each.change}: {each.seconds:.3g} s" for each in self.advice]
        disk = f", disk {_size(self.disk_bytes)}" if self.disk_bytes else ""
        measured = []
        if self.measured_because is not None:
            measured.append(f"from a real microbatch, as a dry run has no numbers: {self.measured_because}")
        if self.measured is not None and self.measured.seconds is not None:
            measured.append(f"measured: {self.measured.seconds:.3g} s a step, peak {_size(self.measured.peak_bytes)}")
        return [
            f"budget {_size(self.budget)}; least {_size(self.least_bytes)}, ideal {_size(self.ideal_bytes)}",
            f"{self.seconds:.3g} s a step of {self.microbatches} microbatches in rounds of {self.round_size}; "
            f"needs {_size(self.peak_bytes)} at once, holds {_size(self.held_bytes)}, stash {_size(self.stash_bytes)}, "
            f"host {_size(self.host_bytes)}{disk}",
            *measured,
            *([f"in rows, with the loss: {', '.join(self.heads_in_rows)}"] if self.heads_in_rows else []),
            f"busy: {lanes}; {self.binding} binds",
            "what would help: " + ("; ".join(advice) if advice else "nothing that was tried"),
        ]

    def _table(self) -> list[str]:
        rows = [("segment", "times", "saves", "keeps", "moves", "ms a step", "choice"), *_rows(self.segments)]
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = []
        for name, *numbers, choice in rows:
            cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells, choice]))
        return lines

    def _curve_lines(self) -> list[str]:
        slowest = max((seconds for _, seconds in self.curve), default=0.0) or 1.0
        return [
            f"{_size(budget):>12}  {seconds:8.3g} s  " + "#" * max(1, round(_BAR * seconds / slowest))
            for budget, seconds in self.curve
        ]


def _rows(segments: Iterable[PlannedSegment]) -> list[tuple[str, ...]]:
    """One row for all segments that differ in their number only, such as the same part of several layers."""
    alike: dict[tuple[object, ...], list[PlannedSegment]] = {}
    for each in segments:
        name = re.sub(r"\d+", "*", each.name)
        alike.setdefault((name, each.choice, each.saved_bytes, each.kept_bytes, each.moved_bytes), []).append(each)
    return [
        (
            same[0].name if len(same) == 1 else str(key[0]),
            str(len(same)),
            _size(same[0].saved_bytes),
            _size(same[0].kept_bytes),
            _size(same[0].moved_bytes),
            f"{1000 * sum(each.seconds for each in same):.3g}",
            f"{same[0].choice}: {same[0].why}" if same[0].saved_bytes else "-",
        )
        for key, same in alike.items()
    ]


def _size(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} B"
