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
    """Blocks that were pinned, and the fibers that ran meanwhile, each with the number of its graph's piece."""

    blocks: list[int]
    pieces: list[tuple[Fiber[Result], int]]


class RoundGraphs(Generic[Result]):
    """The graphs of a round's microbatches, in their order.

    Args:
        owner: Run that the round belongs to.
        take_root: Function that takes the tensor from which backward starts out of a work's result.
        count: Number of microbatches.

    Attributes:
        staged: Backward in pieces that runs the graphs.
        added: Number of microbatches whose graphs were added.
        others: Contexts of other models that these graphs run through.
    """

    def __init__(self, owner: engine.BackwardParticipant, take_root: Callable[[Result], Tensor], count: int) -> None:
        self.staged = _C.StagedBackward()
        self.added = 0
        self.others: list[engine.BackwardParticipant] = []
        self._owner = owner
        self._take_root = take_root
        self._regions = [GraphExecGroup() for _ in range(count)]

    def add(self, fiber: Fiber[Result]) -> None:
        """Adds the graph of the next microbatch, whose forward has ended."""
        root = self._take_root(fiber.result)  # type: ignore[arg-type]
        for known in engine.reached_by([root]):  # before the graph is cut into pieces
            if known is not self._owner and known not in self.others:
                self.others.append(known)
        self.staged.add(root, fiber.marks)
        self.added += 1

    @property
    def can_be_early(self) -> bool:
        """Whether last pieces may run before the graphs of all microbatches were added."""
        return not (self.staged.refusal or self.staged.nested or self.others)

    def other_leaves(self) -> list[Tensor]:
        """The leaves that are not device parameters, and all parameters of other models."""
        leaves = [leaf for leaf in self.staged.leaves() if not _C.is_face(leaf)]
        return leaves + [parameter for other in self.others for parameter in other.model.parameters()]

    def plan(self, stays: Sequence[Stay[Result]]) -> None:
        """Sets the order in which :meth:`run` runs the pieces: from the last stay to the first."""
        self.staged.plan([(fiber.index, piece) for stay in reversed(stays) for fiber, piece in stay.pieces])

    def run_last_piece(self, index: int) -> None:
        """Runs the backward of this microbatch's last piece."""
        with self._regions[index]:
            self.staged.run_last_piece(self._owner.core.gradients)

    def run(self, index: int, turn: int) -> None:
        """Runs the backward of this turn's piece, which belongs to this microbatch."""
        with self._regions[index]:
            self.staged.run(turn)
            self._owner.core.gradients.run_hooks()


def other_leaves(owner: engine.BackwardParticipant, root: Tensor) -> list[Tensor]:
    """The leaves behind a root that are not device parameters, and all parameters of other models that it reaches."""
    others = [known for known in engine.reached_by([root]) if known is not owner]
    return _C.other_leaves([root]) + [parameter for other in others for parameter in other.model.parameters()]


def nested_sums(fibers: Sequence[Fiber[Result]], stays: Sequence[Stay[Result]]) -> str:
    """Why nested backwards would sum gradients in another order than a loop; empty if they would not.

    They accumulate as they run. That is known to be in order only if all microbatches make the same calls.
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
