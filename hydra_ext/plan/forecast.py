"""What a planned step looks like: plain values, and the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydra_ext import _C

_BAR = 24  # characters of the longest bar


@dataclass(frozen=True, kw_only=True)
class PlannedSegment:
    """What becomes of what one segment saves for backward.

    Attributes:
        name: The module.
        choice: ``keep``, ``offload``, ``recompute``, ``recompute, inputs offloaded``, or ``compress``.
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
class Plan:
    """How a training step runs under a budget. ``str()`` gives a table.

    Attributes:
        budget: Device bytes.
        least_bytes: The smallest budget that any plan fits.
        ideal_bytes: The budget with which nothing has to move.
        peak_bytes: The most bytes in use, without weights that stay only because there is room.
        host_bytes: Of weights, gradients and activations on the host, without the optimizer's state.
        microbatches: Of a step.
        round_size: Microbatches that run together; 1 for one after the other.
        stash_bytes: Room for activations on their way.
        seconds: Of a step.
        lanes: Seconds in which compute and each direction of the link are busy.
        segments: In the order of their calls.
        curve: Budgets, and the seconds of a step with each.
        advice: What would help, the best first.
    """

    budget: int
    least_bytes: int
    ideal_bytes: int
    peak_bytes: int
    host_bytes: int
    microbatches: int
    round_size: int
    stash_bytes: int
    seconds: float
    lanes: Mapping[str, float]
    segments: tuple[PlannedSegment, ...]
    curve: tuple[tuple[int, float], ...]
    advice: tuple[Advice, ...]

    @property
    def binding(self) -> str:
        """The lane that is busy the longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._table(), "", *self._curve_lines()])

    def _head(self) -> list[str]:
        human = _C.human_bytes
        lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.lanes.items())
        advice = [f"{each.change}: {each.seconds:.3g} s" for each in self.advice]
        return [
            f"budget {human(self.budget)}; least {human(self.least_bytes)}, ideal {human(self.ideal_bytes)}",
            f"{self.seconds:.3g} s a step of {self.microbatches} microbatches in rounds of {self.round_size}; "
            f"peak {human(self.peak_bytes)}, stash {human(self.stash_bytes)}, host {human(self.host_bytes)}",
            f"busy: {lanes}; {self.binding} binds",
            "what would help: " + ("; ".join(advice) if advice else "nothing that was tried"),
        ]

    def _table(self) -> list[str]:
        human = _C.human_bytes
        rows = [("segment", "saves", "keeps", "moves", "ms a step", "choice")]
        rows += [
            (
                each.name,
                human(each.saved_bytes),
                human(each.kept_bytes),
                human(each.moved_bytes),
                f"{1000 * each.seconds:.3g}",
                f"{each.choice} ({each.why})",
            )
            for each in self.segments
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = []
        for name, *numbers, choice in rows:
            cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells, choice]))
        return lines

    def _curve_lines(self) -> list[str]:
        slowest = max((seconds for _, seconds in self.curve), default=0.0) or 1.0
        return [
            f"{_C.human_bytes(budget):>12}  {seconds:8.3g} s  " + "#" * max(1, round(_BAR * seconds / slowest))
            for budget, seconds in self.curve
        ]
