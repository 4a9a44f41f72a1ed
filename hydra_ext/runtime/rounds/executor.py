"""One round: the forwards of its microbatches block by block, then their backwards block by block.

The fibers need not take the same way. The executor looks where they are parked, goes to the first of these sites, pins
what it needs, and lets those that are parked there go on; that is a *stay*. The backward goes through the stays from
the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import GraphExecGroup

from hydra_ext import _C
from hydra_ext.runtime import engine
from hydra_ext.runtime.rounds.fibers import Fiber, Result
from hydra_ext.runtime.rounds.isolation import Attributes, Surroundings, replaced_functions


class Refused(Exception):  # noqa: N818 - no error: the microbatches are run one by one then
    """These microbatches cannot be run as a round and be equal to a loop. Nothing has been accumulated."""


class RoundOwner(engine.BackwardParticipant, Protocol):
    """The run that a round belongs to."""

    device: torch.device
    model: nn.Module

    def forward_kind(self) -> _C.PassKind: ...
    def forward_window(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Stay(Generic[Result]):
    """Fibers that ran while these blocks were pinned, and the piece of its graph that each made meanwhile."""

    blocks: list[int]
    pieces: list[tuple[Fiber[Result], int]]


class Round(Generic[Result]):
    """Microbatches that pass each block together.

    Args:
        owner: the run.
        works: what each microbatch runs, in its fiber.
        seeds: of the random state that each begins with.
    """

    def __init__(self, owner: RoundOwner, works: Sequence[Callable[[], Result]], seeds: Sequence[int]) -> None:
        self._owner = owner
        self._attributes = Attributes(owner.model)
        self._caller = Surroundings(owner.device)
        self._own = [Surroundings(owner.device) for _ in works]
        for own, seed in zip(self._own, seeds, strict=True):
            own.seed(seed)
        context = _C.ThreadContext()
        self._fibers = [
            Fiber(index, owner, context, self._attributes, work) for index, work in enumerate(works)
        ]
        self._stays: list[Stay[Result]] = []

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> list[Result]:
        """Runs every microbatch to its end. Returns what they returned.

        Raises:
            BaseException: what one of them raised; then all have been unwound.
        """
        try:
            with replaced_functions(), self._owner.forward_window():
                for fiber in self._fibers:
                    fiber.start()
                self._pass_sites()
            for fiber in self._fibers:
                fiber.join()
        except BaseException:
            self._cancel()
            self._attributes.undo()
            raise
        finally:
            self._caller.restore()
        return [fiber.result for fiber in self._fibers]  # type: ignore[misc]

    def _pass_sites(self) -> None:
        core, kind = self._owner.core, self._owner.forward_kind()
        while waiting := [fiber for fiber in self._fibers if not fiber.ended]:
            place = min(fiber.place for fiber in waiting)
            group = [fiber for fiber in waiting if fiber.place == place]
            blocks = frozenset[int]().union(*(fiber.blocks for fiber in group))
            core.stay_in(sorted(blocks), kind)
            for fiber in group:
                with self._turn_of(fiber):
                    fiber.go_on(blocks)
                core.drop_copies()
            self._stays.append(Stay(sorted(blocks), [(fiber, len(fiber.marks) - 1) for fiber in group]))

    @contextmanager
    def _turn_of(self, fiber: Fiber[Result], *, repetition: bool = False) -> Iterator[None]:
        """The process as this microbatch knows it."""
        own = self._own[fiber.index]
        own.restore()
        self._attributes.begin_turn(fiber.index)
        try:
            yield
        finally:
            self._attributes.end_turn(fiber.index, keep=not repetition)
            own.note()

    def _cancel(self) -> None:
        """Ends all fibers. An interrupt while they unwind does not stop that."""
        left = list(self._fibers)
        while left:
            try:
                left[0].cancel()
                left.pop(0)
            except BaseException:  # noqa: BLE001 - another error is on its way already
                continue

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Runs the backward of every microbatch from its loss; the graphs are spent.

        Raises:
            Refused: these graphs cannot be run piece by piece.
        """
        order = [(fiber.index, piece) for stay in reversed(self._stays) for fiber, piece in stay.pieces]
        refusal = self._attributes.conflict
        if not refusal:
            staged = _C.StagedBackward(losses, [fiber.marks for fiber in self._fibers], order)
            refusal = staged.refusal
        if refusal:
            self._attributes.undo()
            raise Refused(refusal)
        others = [known for known in engine.reached_by(losses) if known is not self._owner]
        del losses
        try:
            with self._owner.backward_window(), engine.windows_of(others):
                self._run_pieces(staged)
        finally:
            self._attributes.finish()
            self._caller.restore()

    def _run_pieces(self, staged: _C.StagedBackward) -> None:
        core = self._owner.core
        regions = [GraphExecGroup() for _ in self._fibers]
        turn = 0
        for stay in reversed(self._stays):
            core.stay_in(stay.blocks, _C.PassKind.BACKWARD)
            for fiber, _ in stay.pieces:
                with self._turn_of(fiber, repetition=True), regions[fiber.index]:
                    staged.run(turn)
                core.drop_copies()
                turn += 1
        core.stay_in([], _C.PassKind.BACKWARD)
