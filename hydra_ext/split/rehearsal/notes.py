"""What a rehearsal knows about tensors. It is kept by memory, so that it applies to views, too."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra_ext.split.rehearsal.record import Key

Root = tuple[str, str]  # "parameter", "buffer" or "input", and its name


@dataclass
class Note:
    """A note about one piece of memory.

    Attributes:
        event: Number of the event that made it or wrote to it, until the event hands it out; None otherwise.
        tainted: Whether it depends on a result of an event.
        roots: Parameters, buffers and inputs that it was made from, or that lie in it.
        values: Values that lie in it.
        writes: Steps at which it was changed in place.
        foreign: Whether it existed before; otherwise a recorded operation made it.
        made: Step at which it was first seen.
    """

    event: int | None = None
    tainted: bool = False
    roots: frozenset[Root] = frozenset()
    values: list[Key] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    foreign: bool = False
    made: int = 0

    @property
    def state(self) -> set[Root]:
        """The parameters and buffers that lie in this memory, without those that it was computed from."""
        return {root for root in self.roots if root[0] != "input"} if self.foreign else set()
