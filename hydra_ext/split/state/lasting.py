"""Lasting changes of a rehearsal's forward: writes in place, and draws from the user's own generators.

A run may have to be undone, since it leaves the path of its rehearsal. Then named memory is restored, except
parameters. Of other writes only the step of the first is known: before that step, a run can be undone.
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
        named: Buffers, attributes of modules and inputs that the forward writes to.
        step: Step of the first write to other memory that outlives the forward; None if there is none.
        generators: Generators that the forward draws from and that outlive it.
    """

    named: frozenset[Root] = frozenset()
    step: int | None = None
    generators: tuple[weakref.ReferenceType[torch.Generator], ...] = ()

    def alive(self) -> Iterator[torch.Generator]:
        """The generators that are still alive."""
        return (generator for reference in self.generators if (generator := reference()) is not None)

    def undoable_before(self, steps: int) -> bool:
        """Whether a run can be undone after this many steps."""
        return self.step is None or self.step > steps


class Writes:
    """Collects the writes of a forward."""

    def __init__(self) -> None:
        self._names: dict[int, Root] = {}
        self._named: set[Root] = set()
        self._other: ByStorage[int] = ByStorage()  # the step of the first write

    def name(self, tensor: Tensor, root: Root) -> None:
        self._names[storage_key(tensor)] = root

    def note(self, tensor: Tensor, step: int) -> None:
        """Notes a write to memory that, as far as the rehearsal knows, existed before the forward."""
        memory = storage_key(tensor)
        root = self._names.get(memory)
        if root is not None and root[0] != "parameter":
            self._named.add(root)
        elif self._other.get(tensor) is None and memory != id(tensor):
            self._other.put(tensor, step)

    def lasting(self, generators: tuple[weakref.ReferenceType[torch.Generator], ...]) -> Lasting:
        """The changes that outlive the forward. Called when all its tensors have been freed."""
        steps = [step for _, step in self._other.alive()]
        return Lasting(frozenset(self._named), min(steps, default=None), generators)
