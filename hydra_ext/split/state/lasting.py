"""What a rehearsal's forward has changed in place, and what has drawn from generators of the user's own.

Where a run has to be undone, since another rehearsal knows its way better, what has a name is put back. That memory
without a name, or a parameter, was changed is only known: before, a run can be undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ext.state.memory import ByStorage, storage_key

Root = tuple[str, str]  # as in the notes of a rehearsal


@dataclass(frozen=True)
class Lasting:
    """
    Attributes:
        named: buffers, attributes of modules, and inputs that the forward writes to.
        step: of the first write to something else that outlives the forward; None where there is none.
        generators: that it draws from, if they outlive it.
    """

    named: frozenset[Root] = frozenset()
    step: int | None = None
    generators: tuple[weakref.ReferenceType[torch.Generator], ...] = ()

    def alive(self) -> Iterator[torch.Generator]:
        """The generators that are still there."""
        return (generator for reference in self.generators if (generator := reference()) is not None)

    def undoable_before(self, steps: int) -> bool:
        """Whether a run that has made so many steps can be undone."""
        return self.step is None or self.step > steps


class Writes:
    """Collects them."""

    def __init__(self) -> None:
        self._names: dict[int, Root] = {}
        self._named: set[Root] = set()
        self._other: ByStorage[int] = ByStorage()  # when first

    def name(self, tensor: Tensor, root: Root) -> None:
        self._names[storage_key(tensor)] = root

    def note(self, tensor: Tensor, step: int) -> None:
        """The tensor, whose memory was there before the forward as far as one can tell, is written to."""
        memory = storage_key(tensor)
        root = self._names.get(memory)
        if root is not None and root[0] != "parameter":
            self._named.add(root)
        elif self._other.get(tensor) is None and memory != id(tensor):
            self._other.put(tensor, step)

    def lasting(self, generators: tuple[weakref.ReferenceType[torch.Generator], ...]) -> Lasting:
        """Once nothing of the forward is left."""
        steps = [step for _, step in self._other.alive()]
        return Lasting(frozenset(self._named), min(steps, default=None), generators)
