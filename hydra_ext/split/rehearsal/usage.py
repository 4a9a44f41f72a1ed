"""What a recorder notes of the event and of the glue call that run, and where there can be no cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hydra_ext.split.rehearsal.notes import Root
from hydra_ext.split.rehearsal.operations import checkpoint_frame

MADE_ONCE = (
    "what is made once and kept (a mask, a table of positions) has to be there before: make it in __init__, or run a "
    "forward of the whole model before the pipeline is made"
)


@dataclass
class Usage:
    """What an event, with the glue after it, needs and changes.

    Attributes:
        sets: buffers that the glue replaces by what every stage computes alike.
    """

    roots: set[Root] = field(default_factory=set)
    writes: set[Root] = field(default_factory=set)
    sets: set[Root] = field(default_factory=set)


@dataclass
class Running:
    """The event that runs now.

    Attributes:
        arguments: its tensors.
        written: memory from outside that it has written to, and that did not depend on events before.
        reads_values: Python code in it has looked at a tensor's elements.
    """

    index: int
    arguments: list[Tensor]
    written: list[int] = field(default_factory=list)
    reads_values: bool = False


@dataclass
class GlueContext:
    """The glue call that runs now.

    Attributes:
        made: memory that came into being in it.
        read: what it read that depends on events, by memory.
        written: memory that it has written such things to, and that did not depend on events before.
        tainted: its results depend on an event, or are random numbers.
        writes: it has changed something in place.
        state: it has changed a parameter or buffer, by nothing that depends on an event.
    """

    roots: set[Root] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    read: dict[int, Tensor] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    tainted: bool = False
    writes: bool = False
    state: bool = False


@dataclass(frozen=True)
class Refusal:
    """No cut at a boundary whose step is in (after, until]; ``until`` None for all that follow."""

    reason: str
    after: int
    until: int | None = None

    def holds_at(self, step: int) -> bool:
        return self.after < step and (self.until is None or step <= self.until)


class Cuts:
    """Where in the forward there can be no cut.

    Attributes:
        step: of the forward so far.
        refusals: all that were made.
        frames: of checkpoints: the steps inside each.
    """

    def __init__(self) -> None:
        self.step = 0
        self.refusals: list[Refusal] = []
        self.frames: dict[int, list[int]] = {}

    def next_step(self) -> int:
        self.step += 1
        frame = checkpoint_frame()
        if frame is not None:
            self.frames.setdefault(frame, []).append(self.step)
        return self.step

    def refuse(self, reason: str, *, after: int | None = None, until: int | None = None) -> None:
        refusal = Refusal(reason, self.step if after is None else after, until)
        if refusal not in self.refusals:
            self.refusals.append(refusal)
