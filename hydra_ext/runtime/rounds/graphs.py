"""The graphs of a round's microbatches, and the backward that runs them piece by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

from hydra_ext import _C
from hydra_ext.runtime import engine
from hydra_ext.runtime.rounds.fibers import Fiber, Result


@dataclass(frozen=True)
class Stay(Generic[Result]):
    """Fibers that ran while these blocks were pinned, and the piece of its graph that each made meanwhile."""

    blocks: list[int]
    pieces: list[tuple[Fiber[Result], int]]


class RoundGraphs(Generic[Result]):
    """The graphs that microbatches have made, in their order.

    Args:
        owner: the run.
        take_root: takes what a microbatch's backward starts from out of what its work returned.
        count: of microbatches.

    Attributes:
        staged: runs them.
        added: microbatches whose graphs it has.
        others: other models that these graphs run through.
    """

    def __init__(self, owner: engine.BackwardParticipant, take_root: Callable[[Result], Tensor], count: int) -> None:
        self.staged = _C.StagedBackward()
        self.added = 0
        self.others: list[engine.BackwardParticipant] = []
        self._owner = owner
        self._take_root = take_root
        self._regions = [GraphExecGroup() for _ in range(count)]

    def add(self, fiber: Fiber[Result]) -> None:
        """Of the next microbatch, which has ended."""
        root = self._take_root(fiber.result)  # type: ignore[arg-type]
        for known in engine.reached_by([root]):  # while the graph is whole
            if known is not self._owner and known not in self.others:
                self.others.append(known)
        self.staged.add(root, fiber.marks)
        self.added += 1

    @property
    def can_be_early(self) -> bool:
        """Whether last pieces may run before the graphs of all microbatches are there."""
        return not (self.staged.refusal or self.staged.nested or self.others)

    def other_leaves(self) -> list[Tensor]:
        """Those that are no parameter of the owner's model."""
        leaves = [leaf for leaf in self.staged.leaves() if not _C.is_face(leaf)]
        return leaves + [parameter for other in self.others for parameter in other.model.parameters()]

    def plan(self, stays: Sequence[Stay[Result]]) -> None:
        """In which order :meth:`run` runs the pieces."""
        self.staged.plan([(fiber.index, piece) for stay in reversed(stays) for fiber, piece in stay.pieces])

    def run_last_piece(self, index: int) -> None:
        """Of this microbatch."""
        with self._regions[index]:
            self.staged.run_last_piece(self._owner.core.gradients)

    def run(self, index: int, turn: int) -> None:
        """The piece of this turn, which is this microbatch's."""
        with self._regions[index]:
            self.staged.run(turn)
            self._owner.core.gradients.run_hooks()


def nested_sums(fibers: Sequence[Fiber[Result]], stays: Sequence[Stay[Result]]) -> str:
    """Why backwards inside the backward would sum in another order than a loop; empty when they would not.

    They accumulate when they come to it, which is known to be in order only where all microbatches do the same.
    """
    together = all(len(stay.pieces) == len(fibers) for stay in stays)
    for fiber in fibers:
        calls = Counter(block for blocks, _ in fiber.calls for block in blocks)
        for other in fibers:
            nested = {block for blocks, graph in other.calls if not graph for block in blocks}
            once = all(calls[block] == 1 for block in nested)
            alike = not any(graph and blocks & nested for blocks, graph in fiber.calls)
            if nested and not (together and once and alike):
                return "blocks inside a reentrant checkpoint are called elsewhere, too, or not by all microbatches"
    return ""
