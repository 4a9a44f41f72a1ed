"""Births and deaths of storages in the course of one microbatch, and the most bytes alive in each of its parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of a microbatch: the forward or the backward of one call of a module, without the calls inside.

    Attributes:
        call: Number of the call; calls inside a call have higher numbers. 0 is the microbatch as a whole.
    """

    call: int
    is_backward: bool = False


class Timeline:
    """Collects what happens, and adds it up when all is over: which bytes are gradients is known only then."""

    def __init__(self) -> None:
        self._moments: list[tuple[Part, int, int]] = []  # the part, bytes more or fewer, the storage
        self._begins: dict[int, int] = {}

    def add(self, part: Part, storage: int, change: int) -> None:
        """A storage is made or freed."""
        self._moments.append((part, change, storage))

    def pass_by(self, part: Part, size: int = 0) -> None:
        """The part runs now, and has bytes that belong to no storage for a moment."""
        self.add(part, 0, size)
        self.add(part, 0, -size)

    def begin(self, part: Part) -> None:
        """A call begins."""
        self._begins[part.call] = len(self._moments)
        self.pass_by(part)

    def most(self, *, without: Collection[int]) -> dict[Part, int]:
        """The most bytes that are alive at once in each part, without some storages."""
        most: dict[Part, int] = {}
        alive = 0
        for part, change, storage in self._moments:
            if storage not in without:
                alive += change
            if change >= 0:
                most[part] = max(most.get(part, 0), alive)
        return most

    def at_begin(self, *, without: Collection[int]) -> dict[int, int]:
        """Bytes that are alive when each call begins, without some storages."""
        alive = [0]
        for _, change, storage in self._moments:
            alive.append(alive[-1] + (0 if storage in without else change))
        return {call: alive[at] for call, at in self._begins.items()}
