"""A whole training step: rounds, clipping, the optimizer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hydra_ext import _C, optim
from hydra_ext.activations.repeatable import Deviation
from hydra_ext.blocks import Site
from hydra_ext.errors import StateError, UnsupportedModel
from hydra_ext.runtime.averaging import Averaging, StepAgain
from hydra_ext.runtime.rounds.choice import Choice, Decision
from hydra_ext.runtime.rounds.executor import Known, OutOfOrder, Refused, Round, RoundOwner, SharesGraph
from hydra_ext.runtime.rounds.isolation import Surroundings
from hydra_ext.runtime.rounds.microbatch import Outcome, Work, take_root
from hydra_ext.runtime.rounds.notices import tell_again, tell_alone, tell_deviation
from hydra_ext.runtime.rounds.out_of_memory import OUT_OF_MEMORY, told
from hydra_ext.runtime.rounds.recompute import Recomputation
from hydra_ext.runtime.rounds.undoing.undo import Undo, UndoOwner
from hydra_ext.runtime.updates import Updates
from hydra_ext.state.randomness import generators

_WRITTEN_TO = "modified by an inplace operation"  # as autograd says it

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gives back.

    Attributes:
        loss: of the step: the mean of the microbatches' losses, or their sum.
        losses: what ``fn`` returned for each microbatch, without a graph.
        grad_norm: total norm of the gradients before clipping; None without ``max_norm``.
        metrics: what ``fn`` returned beside each loss, its tensors without a graph; None where it returned none.
        skipped: whether the optimizer was left out because ``grad_norm`` is not finite. Only optimizers of
            :mod:`hydra_ext.optim` are; torch's do what they do in a loop.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    metrics: tuple[Any, ...]
    skipped: bool = False


class NotAsALoop(Exception):
    """The backward of several microbatches has left something else than a loop would have, or could not be run."""


class SharedWithEarlier(NotAsALoop):
    """A microbatch uses what another one made in a round before: no round of the step was as in a loop."""


@dataclass(frozen=True)
class LastGradients:
    """What waits for what the last backwards of a step bring; nothing does in those before.

    Attributes:
        sums: takes their squares as they arrive.
        averaging: takes their mean over the ranks.
    """

    sums: Updates | None = None
    averaging: Averaging | None = None

    def begin(self) -> None:
        """The last backward is about to run."""
        if self.sums is not None:
            self.sums.expect_last_gradients()

    def begin_again(self) -> None:
        """They will be brought another time."""
        if self.sums is not None:
            self.sums.step_ended()
        if self.averaging is not None:
            self.averaging.begin_again()


class StepOwner(RoundOwner, UndoOwner, Protocol):
    """The run whose model is trained."""

    updates: Updates | None

    def activation_bytes(self) -> int: ...


class Stepper:
    """The training steps of one run.

    Attributes:
        rounds: how many there were.
        refusals: rounds whose microbatches could not be run together.
        fallbacks: microbatches that were run one at a time instead.
        retries: rounds that were undone and run again otherwise: they ran out of memory, or have shown what to look at.
    """

    def __init__(self, owner: StepOwner, sites: Sequence[Site], choice: Choice) -> None:
        self._owner_reference = weakref.ref(owner)  # which has this, and would be kept by it
        self._choice = choice
        self._recomputation = Recomputation(sites, owner.device)
        self._undo = Undo()
        self._known = Known()
        self._backward_known = False  # whether it writes to buffers
        self._looped = False  # without rounds from now on
        self._alone = False  # in rounds of one microbatch from now on
        self.rounds = 0
        self.refusals = 0
        self.fallbacks = 0
        self.retries = 0

    @property
    def _owner(self) -> StepOwner:
        """Itself, and no proxy: it is compared with the engine's participants."""
        owner = self._owner_reference()
        if owner is None:
            raise StateError("the run whose steps these are is no more")
        return owner

    def step(
        self,
        works: Sequence[Work[Any]],
        seeds: Sequence[int],
        *,
        max_norm: float | None,
        round_size: int | None,
        recompute: bool | None,
        reduction: Reduction,
        scaler: torch.amp.GradScaler | None,
        averaging: Averaging | None,
    ) -> StepOutput:
        optimizer = self._owner.optimizer
        if optimizer is None:
            raise StateError("run.step needs the optimizer: offload(model, optimizer, budget=...)")
        updates = self._owner.updates if scaler is None else None  # else the scaler writes the gradients once more
        last = LastGradients(updates if max_norm is not None else None, averaging)
        self._undo.step_begins(self._owner)
        try:
            outcomes = self._all(works, seeds, round_size, recompute, last)
            norm, skipped = self._update(optimizer, max_norm, scaler)
        finally:
            self._undo.step_ended()
            if updates is not None:
                updates.step_ended()
        losses = torch.stack([outcome.loss for outcome in outcomes])
        return StepOutput(
            loss=losses.mean() if reduction == "mean" else losses.sum(),
            losses=losses.unbind(),
            grad_norm=norm,
            metrics=tuple(outcome.metrics for outcome in outcomes),
            skipped=skipped,
        )

    def _all(
        self,
        works: Sequence[Work[Any]],
        seeds: Sequence[int],
        size: int | None,
        recompute: bool | None,
        last: LastGradients,
    ) -> list[Outcome]:
        """Forward and backward of every microbatch. What runs out of memory is undone and tried another way."""
        outcomes: list[Outcome] = []
        while True:
            first = len(outcomes)
            # What only a backward would show is seen alone first where it could not be taken back.
            alone = self._alone or (not self._backward_known and self._undo.step_cannot_be_undone())
            decision = self._choice.next(len(works) - first, size=1 if alone else size, recompute=recompute)
            end = first + decision.size
            try:
                complete = last if end == len(works) else LastGradients()
                outcomes += self._run(works[first:end], seeds[first:end], decision, complete)
                if len(outcomes) < len(works):
                    continue
                if last.averaging is not None:
                    last.averaging.complete()
                return outcomes
            except OUT_OF_MEMORY as error:
                obstacle = self._why_not_again(decision, size, recompute, last.averaging)
                if obstacle:
                    raise told(error, obstacle) from error
                failed = str(error).partition(" While running ")[0]
            except NotAsALoop as error:
                self._refuse(error)
                failed = ""
                obstacle = self._why_not_undone(last.averaging)
                if obstacle:
                    raise UnsupportedModel(f"{error}, and run.step cannot take that back: {obstacle}") from error
            except Deviation as error:  # from now on that block is kept
                obstacle = self._why_not_undone(last.averaging)
                if obstacle:
                    raise Deviation(
                        f"{error}. This step is not complete, and cannot be made again: {obstacle}"
                    ) from error
                tell_deviation(error)
                failed = "A block's second call gave something else"
            except StepAgain:
                failed = "Another rank makes the step again"
            # No frame of the round is left here, and with it nothing that it had on the device.
            if self._take_back(len(works[first:end]), failed, last):
                outcomes.clear()

    def _why_not_again(
        self, decision: Decision, size: int | None, recompute: bool | None, averaging: Averaging | None
    ) -> str:
        """Why a round that has run out of memory is not tried another way; empty if it is. Then all ranks know."""
        if size is not None:
            return f"round_size={size} was given, and so nothing else was tried."
        if self._looped:
            return "The microbatches were run one at a time."
        if not self._choice.fail(decision, recompute=recompute):
            kinds = {None: ", keeping activations and making them again", False: ", keeping activations"}
            tried = kinds.get(recompute, ", making activations again")
            return f"run.step tried rounds down to one microbatch{tried}."
        obstacle = self._why_not_undone(averaging)
        return f"Nothing else was tried, as the step cannot be undone: {obstacle}." if obstacle else ""

    def _why_not_undone(self, averaging: Averaging | None) -> str:
        """Why what has been done cannot be undone; empty if it can. Then all ranks know."""
        whole = self._undo.moved_gradients(self._owner)
        obstacle = self._undo.obstacle(whole=whole)
        if not obstacle and whole and averaging is not None and not averaging.ask_again():
            return "the other ranks have made the step"
        return obstacle

    def _take_back(self, size: int, failed: str, last: LastGradients) -> bool:
        """Undoes a round of so many microbatches, or the whole step if gradients have moved: True.

        Args:
            size: of the round.
            failed: how it ran out of memory, if it did.
            last: of the step.
        """
        gc.collect()  # of what refers to itself, such as an exception by its frames
        whole = self._undo.moved_gradients(self._owner)
        if whole:
            last.begin_again()
        obstacle = self._undo.obstacle(whole=whole)
        if obstacle:  # of this rank, where another one has asked
            raise StateError(f"{failed or 'The step is to be made again'}, and this rank cannot do so: {obstacle}")
        self._undo.undo(whole=whole)
        if failed:
            self._tell_again(size, failed)
        return whole

    def _tell_again(self, size: int, why: str) -> None:
        """A round of so many microbatches has been undone, and is run otherwise."""
        if not self.retries:
            tell_again(size, why)
        self.retries += 1

    def _run(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome]:
        """Of all of them; of none where each is to have a round of its own, which can be undone by itself."""
        self._undo.round_begins(self._owner)
        if self._looped:
            return self._one_at_a_time(works, seeds, last)
        try:
            outcomes = self._round(works, seeds, decision, last)
            while outcomes is None:
                self._undo_round("the forward has to be run again")
                self._tell_again(len(works), "Its forward has shown what is to be looked at, or kept")
                outcomes = self._round(works, seeds, decision, last)
            return outcomes
        except Refused as refused:
            if isinstance(refused, SharesGraph) and self._undo.join_rounds(self._owner):
                raise SharedWithEarlier(str(refused)) from refused  # whose backward has spent its edges
            self._refuse(refused)
            self._undo_round(refused)
        return self._one_at_a_time(works, seeds, last) if self._looped else []

    def _undo_round(self, why: object) -> None:
        obstacle = self._undo.obstacle(whole=False)
        if obstacle:
            raise UnsupportedModel(f"{why}, and run.step cannot take that back: {obstacle}")
        self._undo.undo(whole=False)

    def _refuse(self, error: Refused | NotAsALoop) -> None:
        self.refusals += 1
        tell_alone(f"{error}. What is undone is made again: what fn does outside the model is done twice")
        self._alone = isinstance(error, (OutOfOrder, NotAsALoop)) and not isinstance(error, SharedWithEarlier)
        self._looped = not self._alone

    def _round(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome] | None:
        """None if it is to be run anew: recomputed blocks gave something else, or modules are to be looked at."""
        owner, undo = self._owner, self._undo
        self._known.generators = undo.generators()
        this = Round(
            owner,
            works,
            seeds,
            take_root,
            self._recomputation if decision.recompute else None,
            known=self._known,
            last_piece=lambda: undo.last_piece(buffers=not self._backward_known),
        )
        before = owner.activation_bytes()
        try:
            outcomes = this.forward()
            held = owner.activation_bytes() - before
            if not this.repeats() or this.learn(undo.forward_ended(owner)):
                return None
            last.begin()
            this.backward(undo.note_leaves, last.averaging)
            late = self._written_late(this)
            if late and decision.size > 1:
                raise NotAsALoop(f"the backward of several microbatches has {late}, in another order than a loop would")
        except RuntimeError as error:
            if decision.size > 1 and _WRITTEN_TO in str(error):
                raise NotAsALoop("several microbatches have written to what backward needs as it was") from error
            raise
        finally:
            owner.core.gradients.drop_early()
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
        peak = max((size for kind in kinds for _, size in owner.core.pager.recorded(kind)), default=0)
        self._choice.learn(decision, held=held, peak=peak)
        self.rounds += 1
        self._backward_known = True
        if self._alone:
            self.fallbacks += 1
        if decision.size == 1 and not self._alone:
            self._learn_order(this, late)
        return outcomes

    def _learn_order(self, this: Round[Outcome], late: str) -> None:
        """After a round of one microbatch: whether several would not be as a loop."""
        if this.draws.turns > 1:
            late = "it draws from a generator in several turns, or in its backward, too"
        elif late:
            late = f"its backward has {late}"
        elif this.found_more and self._undo.obstacle(whole=False):
            late = f"what it does around blocks could not be undone: {self._undo.obstacle(whole=False)}"
        if late:
            self._alone = True
            tell_alone(late)

    def _written_late(self, this: Round[Outcome]) -> str:
        """What a round's backward has done that several cannot do in the order of a loop; empty if nothing."""
        if this.draws.conflict:
            return f"drawn from {this.draws.conflict}"
        if this.set_late:
            return "set attributes of modules"
        return "changed buffers, or what modules hold" if self._undo.backward_has_written() else ""

    def _one_at_a_time(self, works: Sequence[Work[Any]], seeds: Sequence[int], last: LastGradients) -> list[Outcome]:
        outcomes: list[Outcome] = []
        caller = Surroundings(self._owner.device)
        cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            for work, seed in zip(works, seeds, strict=True):
                for generator in generators(self._owner.device):
                    generator.manual_seed(seed)
                outcomes.append(work())
                if len(outcomes) == len(works):
                    last.begin()
                take_root(outcomes[-1]).backward()  # type: ignore[no-untyped-call]
                self.fallbacks += 1
        finally:
            torch.set_autocast_cache_enabled(cached)
            caller.restore()
        return outcomes

    def _update(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, scaler: torch.amp.GradScaler | None
    ) -> tuple[Tensor | None, bool]:
        parameters = list(self._owner.model.parameters())
        updates = self._owner.updates
        norm, skipped = None, False
        if scaler is None and updates is not None:
            norm, skipped = updates.step(parameters, max_norm)
            optimizer.zero_grad()
            return norm, skipped
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            clip = torch.nn.utils.clip_grad_norm_ if updates is None else optim.clip_grad_norm_
            norm = clip(parameters, max_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        return norm, skipped
