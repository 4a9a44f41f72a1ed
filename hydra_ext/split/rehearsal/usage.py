"""Notes of a recorder about the running event and the running glue call, and about impossible cuts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hydra_ext.split.rehearsal.notes import Root
from hydra_ext.split.rehearsal.operations import checkpoint_frame

MADE_ONCE = (
    "a tensor that is made once and kept (a mask, a table of positions) must exist before: make it in __init__, or run "
    "a forward of the whole model before the pipeline is made"
)


@dataclass
class Usage:
    """What an event, with the glue after it, needs and changes.

    Attributes:
        roots: Parameters, buffers and inputs that it reads.
        writes: Parameters and buffers that it changes.
        sets: Buffers that the glue replaces by tensors that every stage computes alike.
    """

    roots: set[Root] = field(default_factory=set)
    writes: set[Root] = field(default_factory=set)
    sets: set[Root] = field(default_factory=set)


@dataclass
class Running:
    """The event that runs now.

    Attributes:
        arguments: Tensors among the block's arguments.
        written: Keys of outside memory that it has written to, and that did not depend on events before.
        reads_values: Whether Python code in it has read a tensor's elements.
    """

    index: int
    arguments: list[Tensor]
    written: list[int] = field(default_factory=list)
    reads_values: bool = False


@dataclass
class GlueContext:
    """The glue call that runs now.

    Attributes:
        roots: Parameters, buffers and inputs that it has read.
        made: Keys of memory that was made in it.
        read: Tensors that it has read and that depend on events, by memory.
        written: Keys of memory that depends on events only since this call wrote to it.
        tainted: Whether its results depend on an event, or are random numbers.
        writes: Whether it has changed a tensor in place.
        state: Whether it has changed a parameter or buffer, with numbers that depend on no event.
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
    """A reason against a cut at each boundary whose step is in (after, until]; ``until`` is None for no end."""

    reason: str
    after: int
    until: int | None = None

    def holds_at(self, step: int) -> bool:
        return self.after < step and (self.until is None or step <= self.until)


class Cuts:
    """The steps of the forward, and the refused cuts.

    Attributes:
        step: Number of the current step.
        refusals: All refusals so far.
        frames: Steps inside each non-reentrant checkpoint, by its number.
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
