"""What a rehearsal knows about tensors, by their memory, so that it holds for views too."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra_ext.split.rehearsal.record import Key

Root = tuple[str, str]  # "parameter", "buffer" or "input", and its name


@dataclass
class Note:
    """About one piece of memory.

    Attributes:
        event: that made it, until the event has handed it out; None for what no event made or wrote.
        tainted: it depends on what an event computed.
        roots: the parameters, buffers and inputs that it was made from, or is.
        values: that lie in it.
        writes: steps at which it was changed in place.
        foreign: it was there before.
        made: step at which it was first seen.
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
        """The parameter or buffer that this memory is, not what it was computed from."""
        return {root for root in self.roots if root[0] != "input"} if self.foreign else set()
