"""One round: the forwards of its microbatches block by block, then their backwards block by block.

The fibers need not take the same path. The executor selects the first site at which fibers are parked, pins its blocks,
and resumes the fibers parked there; that is a *stay*. The backward runs through the stays from the last to the first.

The *last piece* of a microbatch is the part of its graph from the entry of its last block on: head and loss, say. If
all microbatches end in the same stay, each last piece runs backward right after its forward. That frees its
activations, often the largest, before the next microbatch allocates its own. The gradients that the early backwards
accumulate can be undone until all forwards have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import StateError
from hydra_ext.runtime import engine
from hydra_ext.runtime.averaging import Averaging
from hydra_ext.runtime.rounds.draws import DrawOrder
from hydra_ext.runtime.rounds.fibers import Fiber, Result
from hydra_ext.runtime.rounds.graphs import RoundGraphs, Stay, nested_sums
from hydra_ext.runtime.rounds.isolation import replaced_functions
from hydra_ext.runtime.rounds.order import Order
from hydra_ext.runtime.rounds.recompute import Recomputation
from hydra_ext.runtime.rounds.turns import Turns
from hydra_ext.runtime.rounds.undoing.accesses import Accesses
from hydra_ext.runtime.rounds.undoing.holders import Holding


class Refused(Exception):
    """These microbatches cannot run as a round with the results of a loop. No gradient has been accumulated."""


class OutOfOrder(Refused):
    """These microbatches have drawn random numbers, or accessed state of modules, in another order than a loop.

    One at a time they do not.
    """


class SharesGraph(Refused):
    """These microbatches use graphs of other microbatches, of this round or of an earlier one."""


@dataclass
class Known:
    """Knowledge about the state of a run's modules, from its rounds so far.

    Attributes:
        watched: State that code around sites writes to.
        accesses: Attributes whose reads are noted.
        generators: Generators of random numbers that modules hold when the round begins.
    """

    watched: list[Holding] = field(default_factory=list)
    accesses: Accesses = field(default_factory=Accesses)
    generators: Sequence[Any] = ()


class RoundOwner(engine.BackwardParticipant, Protocol):
    """The run that a round belongs to."""

    device: torch.device
    layout: Layout

    def forward_kind(self) -> _C.PassKind: ...
    def window(self, kind: _C.PassKind) -> _C.Windows: ...


class Round(Generic[Result]):
    """Microbatches that pass each block together.

    Args:
        owner: Run whose model the microbatches use.
        works: Function for each microbatch, which its fiber runs.
        seeds: Seed of each microbatch's random state.
        take_root: Function that takes the tensor from which backward starts out of a work's result.
        recomputation: Object that makes the sites' calls so that they are recomputed; None keeps activations.
        known: Knowledge about the state of modules, which the round extends.
        last_piece: Factory of a context around each backward of a last piece that runs early.

    Attributes:
        found_more: Whether the forward has shown further state to watch.
    """

    def __init__(
        self,
        owner: RoundOwner,
        works: Sequence[Callable[[], Result]],
        seeds: Sequence[int],
        take_root: Callable[[Result], Tensor],
        recomputation: Recomputation | None = None,
        *,
        known: Known,
        last_piece: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._owner = owner
        self._recomputation = recomputation
        self._known = known
        self._last_piece = last_piece
        self._order = Order(owner.layout.sites, known.watched if len(works) > 1 else ())
        self._turns = Turns(owner.core, owner.device, owner.model, self._order, seeds, known.generators)
        self._context = _C.ThreadContext()
        self._fibers = [
            Fiber(index, owner, self._context, self._turns.attributes, work, recomputation)
            for index, work in enumerate(works)
        ]
        self.found_more = False
        self._stays: list[Stay[Result]] = []
        self._graphs = RoundGraphs(owner, take_root, len(works))
        self._early = len(works) > 1 and (recomputation is None or recomputation.checked)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> list[Result]:
        """Runs the forward of every microbatch to its end. Returns their results.

        Raises:
            OutOfOrder: a microbatch has drawn random numbers, or accessed watched state, after a later one had.
            BaseException: a microbatch has raised it; all have been unwound.
        """
        models = [self._owner.model, *(other.model for other in engine.participants())]
        with self._order.followed(), self._known.accesses.noted(models) if len(self._fibers) > 1 else nullcontext():
            self._stays = self._run_fibers(self._fibers, self._owner.forward_kind())
        return [fiber.result for fiber in self._fibers]  # type: ignore[misc]

    def learn(self, changed: Sequence[Holding]) -> bool:
        """Checks the forward's accesses to state of modules, and learns from them.

        Returns whether the round has to run again because it did not watch all state that it accessed.

        Args:
            changed: State that the forward has written to in place.

        Raises:
            OutOfOrder: state was read and written in another order than a loop.
        """
        known, alone = self._known, len(self._fibers) == 1
        found = self._order.unwatched(changed)
        known.watched += found
        self.found_more = bool(found)
        unnoted = known.accesses.learn(self._turns.attributes.keys().union(*changed))
        turns = self._turns
        conflict = "" if alone else self._order.conflict or turns.attributes.conflict() or turns.trained.conflict()
        again = not alone and not conflict and (unnoted or bool(found))
        if conflict or again:
            self._turns.attributes.undo()
        if conflict:
            raise OutOfOrder(conflict)
        return again

    @property
    def draws(self) -> DrawOrder:
        """The draws from generators that the microbatches share."""
        return self._turns.draws

    @property
    def set_late(self) -> bool:
        """Whether a backward has set an attribute to another value."""
        return self._turns.attributes.set_late

    def repeats(self) -> bool:
        """Whether repeated calls of the recomputed sites compute the same as the first ones.

        If not, the differing sites keep their activations from now on, and the round has to run again. The check costs
        one pass over the blocks, once in a run.
        """
        recomputation = self._recomputation
        if recomputation is None or recomputation.checked:
            return True

        def work() -> bool:
            return recomputation.repeat(fiber)

        fiber: Fiber[bool] = Fiber(0, self._owner, self._context, _Unheard(), work)
        with self._turns.repeated():
            self._run_fibers([fiber], _C.PassKind.INFERENCE, repetition=True)
        if not fiber.result:
            self._turns.attributes.undo()
        return bool(fiber.result)

    def _run_fibers(
        self, fibers: Sequence[Fiber[Any]], kind: _C.PassKind, *, repetition: bool = False
    ) -> list[Stay[Any]]:
        try:
            with replaced_functions(), self._owner.window(kind):
                for fiber in fibers:
                    fiber.start()
                try:
                    stays = self._pass_sites(fibers, kind, repetition=repetition)
                except BaseException:  # re-raised
                    self._turns.trained.undo()
                    raise
                self._turns.trained.finish()
                self._owner.core.rounds.stay_in([], kind)
            for fiber in fibers:
                fiber.join()
            return stays
        except BaseException:  # re-raised when all fibers have ended
            _cancel(fibers)
            if self._recomputation is not None:
                self._recomputation.forget()
            self._turns.attributes.undo()
            raise
        finally:
            self._turns.restore_caller()

    def _pass_sites(self, fibers: Sequence[Fiber[Any]], kind: _C.PassKind, *, repetition: bool) -> list[Stay[Any]]:
        core = self._owner.core
        stays: list[Stay[Any]] = []
        while waiting := [fiber for fiber in fibers if not fiber.ended]:
            place = min(fiber.place for fiber in waiting)
            group = [fiber for fiber in waiting if fiber.place == place]
            blocks = frozenset[int]().union(*(fiber.blocks for fiber in group))
            core.rounds.stay_in(sorted(blocks), kind)
            for fiber in group:
                with self._turns.turn_of(fiber.index, keep=not repetition):
                    fiber.go_on(blocks)
                if self.draws.conflict:
                    raise OutOfOrder(f"they draw from {self.draws.conflict} in another order than a loop")
                if not repetition:
                    self._order.end_turn(fiber.index, ended=fiber.ended)
                if self._order.conflict:
                    raise OutOfOrder(self._order.conflict)
                if fiber.ended and self._early and not repetition:
                    together = bool(blocks) and len(group) == len(fibers) and fiber.index == self._graphs.added
                    self._early = together and self._run_last_piece(fiber)
                    self._note_last_stay(fiber)
                core.rounds.drop_copies()
            stays.append(Stay(sorted(blocks), [(fiber, len(fiber.marks) - 1) for fiber in group]))
        return stays

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, note_leaves: Callable[[Iterable[Tensor]], object], averaging: Averaging | None = None) -> None:
        """Runs the backward of every microbatch. The graphs are spent.

        Args:
            note_leaves: Function that is called, before anything is accumulated, with the tensors whose gradients the
                backward may sum into, without this model's device parameters.
            averaging: Averaging of the gradients, which are final after this backward; None without other ranks or
                before the last backward.

        Raises:
            Refused: these graphs cannot run piece by piece.
            SharesGraph: the graphs lead into those of other microbatches.
            RankFailed: another rank has failed. If it failed before its last backward, this round has no effect.
            StepAgain: another rank makes the step again.
        """
        if averaging is not None:
            try:
                averaging.agree()
            except BaseException:  # re-raised
                self._turns.attributes.undo()
                raise
        graphs = self._graphs
        while graphs.added < len(self._fibers) and not graphs.staged.refusal:
            graphs.add(self._fibers[graphs.added])
        check_nested = graphs.staged.nested and not graphs.staged.refusal
        nested = nested_sums(self._fibers, self._stays) if check_nested else ""
        if graphs.staged.refusal or nested:
            self._turns.attributes.undo()
            raise Refused(nested) if nested else SharesGraph(graphs.staged.refusal)
        if any(other.replicas is not None for other in graphs.others):
            raise StateError(
                "the loss depends on another offloaded model, which averages its own gradients over the ranks: write a "
                "loop in place of run.step, or offload that model with process_group=False"
            )
        note_leaves(graphs.other_leaves())
        engine.begin_backward(self._owner)
        graphs.plan(self._stays)
        try:
            with replaced_functions(), engine.windows_of([self._owner, *graphs.others]):
                try:
                    self._run_pieces(averaging)
                finally:
                    self._turns.trained.finish()
            self._owner.backward_ended(accumulated=True)
        finally:
            self._turns.attributes.finish()
            self._turns.restore_caller()

    def _note_last_stay(self, fiber: Fiber[Result]) -> None:
        """Notes the stay that the next round need not recompute, because an early backward follows it at once."""
        if self._recomputation is not None:
            self._recomputation.last_stay = len(fiber.marks) if self._early else None

    def _run_last_piece(self, fiber: Fiber[Result]) -> bool:
        """Runs the last piece of a fiber that has just ended. Returns False if it has to wait for the other graphs."""
        self._graphs.add(fiber)
        if not self._graphs.can_be_early:
            return False
        if fiber.index == 0:
            self._owner.core.gradients.begin_early()
        with self._last_piece(), self._turns.turn_of(fiber.index, backward=True):
            self._graphs.run_last_piece(fiber.index)
        return True

    def _run_pieces(self, averaging: Averaging | None) -> None:
        core = self._owner.core
        if averaging is not None:
            averaging.follow(self._graphs.staged, sum(len(stay.pieces) for stay in self._stays))
        turn = 0
        for stay in reversed(self._stays):
            if averaging is not None:
                averaging.advance(turn)
            core.rounds.stay_in(stay.blocks, _C.PassKind.BACKWARD)
            for fiber, _ in stay.pieces:
                with self._turns.turn_of(fiber.index, backward=True):
                    self._graphs.run(fiber.index, turn)
                core.rounds.drop_copies()
                turn += 1
        if averaging is not None:
            averaging.complete()
        core.rounds.stay_in([], _C.PassKind.BACKWARD)


def release_workspaces(device: torch.device) -> None:
    """Frees the matrix library's workspaces, of which torch keeps one on a GPU for each thread that has multiplied.

    A thread that ends leaves its workspace to a later one, so after a round there are as many as it had microbatches.
    None is freed while a model is inside a pass: its threads may be about to use theirs.
    """
    if device.type == "cuda" and not any(known.core.gate.open for known in engine.everywhere()):
        torch._C._cuda_clearCublasWorkspaces()  # private, but torch's notes on CUDA name it


class _Unheard:
    """Ignores a repetition's accesses to modules."""

    def note_write(self, index: int, module: nn.Module, name: str, value: Any) -> None:
        pass

    def note_read(self, index: int, module: nn.Module, name: str) -> None:
        pass

    def note_visit(self, index: int, place: int) -> None:
        pass


def _cancel(fibers: Sequence[Fiber[Any]]) -> None:
    """Ends all fibers, also if interrupts arrive while they unwind."""
    left = list(fibers)
    while left:
        try:
            left[0].cancel()
            left.pop(0)
        except BaseException:  # noqa: BLE001 - the caller is raising another error already
            continue
