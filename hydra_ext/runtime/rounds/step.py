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
from hydra_ext.runtime.rounds.choice import Chooser, Decision
from hydra_ext.runtime.rounds.executor import (
    Known,
    OutOfOrder,
    Refused,
    Round,
    RoundOwner,
    SharesGraph,
    release_workspaces,
)
from hydra_ext.runtime.rounds.graphs import other_leaves
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
class StepOptions:
    """What was asked of a step: arguments of :meth:`hydra_ext.Run.step`."""

    max_norm: float | None
    round_size: int | None
    recompute: bool | None
    reduction: Reduction
    scaler: torch.amp.GradScaler | None
    update: bool


@dataclass(frozen=True)
class StepOutput:
    """The results of a step.

    Attributes:
        loss: Loss of the step: the mean of the microbatches' losses, or their sum.
        losses: Loss that ``fn`` returned for each microbatch, without a graph.
        grad_norm: Total norm of the gradients before clipping; None without ``max_norm``.
        metrics: Values that ``fn`` returned beside each loss, with tensors detached; None for each microbatch without.
        skipped: Whether the optimizer's step was skipped because ``grad_norm`` is not finite. Only optimizers of
            :mod:`hydra_ext.optim` skip, and only without a scaler; torch's behave as in a loop.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    metrics: tuple[Any, ...]
    skipped: bool = False


class NotAsALoop(Exception):
    """A round has had another effect than a loop, or may have had one, or its backward could not be run."""


class SharedWithEarlier(NotAsALoop):
    """A microbatch uses the graph of one of an earlier round: the step's rounds could not act as a loop."""


@dataclass(frozen=True)
class LastGradients:
    """Processing of gradients that is active in the last backwards of a step only, when gradients become final.

    Attributes:
        sums: Optimizer steps that sum the gradients' squares on arrival, or None.
        averaging: Averaging over the ranks, or None.
    """

    sums: Updates | None = None
    averaging: Averaging | None = None

    def begin(self) -> None:
        """Called when the last backward is about to run."""
        if self.sums is not None:
            self.sums.expect_last_gradients()

    def begin_again(self) -> None:
        """Called when the whole step is undone: the last backwards will run again."""
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
        rounds: Number of rounds that have ended.
        refusals: Number of rounds whose microbatches could not run together.
        fallbacks: Number of microbatches that ran one at a time instead.
        retries: Number of rounds that were undone and run again, because they ran out of memory, or showed state to
            watch or blocks not to recompute.
    """

    def __init__(self, owner: StepOwner, sites: Sequence[Site], choice: Chooser) -> None:
        self._owner_reference = weakref.ref(owner)  # a reference would be a cycle: the owner refers to this object
        self._choice = choice
        self._recomputation = Recomputation(sites, owner.device)
        self._undo = Undo()
        self._known = Known()
        self._backward_known = False  # whether a backward has been checked for writes to buffers
        self._looped = False  # whether microbatches run without rounds from now on
        self._alone = False  # whether rounds have one microbatch from now on
        self.rounds = 0
        self.refusals = 0
        self.fallbacks = 0
        self.retries = 0

    @property
    def _owner(self) -> StepOwner:
        """The owner itself, not a proxy, because it is compared with the engine's participants."""
        owner = self._owner_reference()
        if owner is None:
            raise StateError("the run that these steps belong to has been deleted")
        return owner

    def step(
        self,
        works: Sequence[Work[Any]],
        seeds: Sequence[int],
        options: StepOptions,
        averaging: Averaging | None,
    ) -> StepOutput:
        optimizer, max_norm, scaler = self._owner.optimizer, options.max_norm, options.scaler
        round_size, recompute = options.round_size, options.recompute
        if optimizer is None:
            raise StateError("run.step needs the optimizer: offload(model, optimizer, budget=...)")
        if max_norm is not None and not options.update:
            raise ValueError("with update=False run.step leaves the gradients as they are: leave out max_norm=")
        updates = self._owner.updates if scaler is None else None  # a scaler writes to gradients after their arrival
        last = LastGradients(updates if max_norm is not None else None, averaging)
        self._recomputation.asked = recompute is True
        try:
            self._undo.step_begins(self._owner, joins=averaging is None)  # other ranks would have to agree
            self._choice.step_begins(
                [work.nbytes for work in works],
                size=1 if self._alone or self._looped else round_size,
                recompute=recompute,
            )
            outcomes = self._all(works, seeds, round_size, recompute, last)
            self._choice.step_ended()
            norm, skipped = self._update(optimizer, max_norm, scaler) if options.update else (None, False)
        finally:
            self._undo.ended()
            if updates is not None:
                updates.step_ended()
        losses = torch.stack([outcome.loss for outcome in outcomes])
        return StepOutput(
            loss=losses.mean() if options.reduction == "mean" else losses.sum(),
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
        """Runs forward and backward of every microbatch. A round that fails is undone and retried in another way."""
        outcomes: list[Outcome] = []
        while True:
            first = len(outcomes)
            # If the step cannot be undone, the first round has one microbatch, to see what its backward writes to.
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
                self._undo.ended()  # before the optimizer writes to all parameters
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
                    raise UnsupportedModel(f"{error}, and run.step cannot undo that: {obstacle}") from error
            except Deviation as error:  # the block's activations are kept from now on
                obstacle = self._why_not_undone(last.averaging)
                if obstacle:
                    raise Deviation(
                        f"{error}. This step is not complete, and cannot be made again: {obstacle}"
                    ) from error
                tell_deviation(error)
                failed = "A block's second call computed something else"
            except StepAgain:
                failed = "Another rank makes the step again"
            # Here no frame of the round exists any more, so nothing keeps its tensors on the device.
            if self._take_back(len(works[first:end]), failed, last):
                outcomes.clear()

    def _why_not_again(
        self, decision: Decision, size: int | None, recompute: bool | None, averaging: Averaging | None
    ) -> str:
        """Why a round that has run out of memory is not retried in another way; empty if it is.

        If gradients have moved, the other ranks have then been told to make the step again.
        """
        tried = self._choice.fail(decision, size=size, recompute=recompute, looped=self._looped)
        if tried:
            return tried
        obstacle = self._why_not_undone(averaging)
        return f"Nothing else was tried, because the step cannot be undone: {obstacle}." if obstacle else ""

    def _why_not_undone(self, averaging: Averaging | None) -> str:
        """Why the round, or the step if gradients have moved, cannot be undone; empty if it can.

        If gradients have moved, the other ranks have then been told to make the step again.
        """
        whole = self._undo.moved_gradients(self._owner)
        obstacle = self._undo.obstacle(whole=whole)
        if not obstacle and whole and averaging is not None and not averaging.ask_again():
            return "the other ranks have completed the step"
        return obstacle

    def _take_back(self, size: int, failed: str, last: LastGradients) -> bool:
        """Undoes a round, or the whole step if gradients have moved. Returns whether it was the step.

        Args:
            size: Number of microbatches of the round.
            failed: Reason for the warning about the retry; empty if the refusal was reported already.
            last: Processing of the step's last gradients.
        """
        gc.collect()  # frees reference cycles, such as those of an exception and its frames
        whole = self._undo.moved_gradients(self._owner)
        if whole:
            last.begin_again()
        obstacle = self._undo.obstacle(whole=whole)
        if obstacle:  # another rank has asked to make the step again, which this one cannot undo
            raise StateError(f"{failed or 'The step is to be made again'}, and this rank cannot undo it: {obstacle}")
        self._undo.undo(whole=whole)
        if failed:
            self._tell_again(size, failed)
        return whole

    def _tell_again(self, size: int, why: str) -> None:
        """Counts a round that was undone and runs in another way; the first one is logged."""
        if not self.retries:
            tell_again(size, why)
        self.retries += 1

    def _run(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome]:
        """Runs a round. Returns no outcomes if it was refused and its microbatches are to have rounds of their own."""
        one_at_a_time = self._looped or decision.alone
        self._undo.round_begins(self._owner, one_at_a_time=one_at_a_time)
        if one_at_a_time:
            outcomes = self._one_at_a_time(works, seeds, last)
            self._choice.learn(decision, held=0, peak=0)
            self.rounds += 0 if self._looped else len(works)
            self.fallbacks += len(works) if self._looped else 0
            return outcomes
        try:
            found = self._round(works, seeds, decision, last)
            while found is None:
                self._undo_round("the forward has to be run again")
                self._tell_again(len(works), "Its forward showed state to watch, or blocks that cannot be recomputed")
                found = self._round(works, seeds, decision, last)
            return found
        except Refused as refused:
            if isinstance(refused, SharesGraph) and self._undo.join_rounds(self._owner):
                raise SharedWithEarlier(str(refused)) from refused  # the earlier round's graphs are spent
            looped = self._refuse(refused)
            self._undo_round(refused)
        if not looped:
            return []
        self.fallbacks += len(works)
        return self._one_at_a_time(works, seeds, last)

    def _undo_round(self, why: object) -> None:
        obstacle = self._undo.obstacle(whole=False)
        if obstacle:
            raise UnsupportedModel(f"{why}, and run.step cannot undo that: {obstacle}")
        self._undo.undo(whole=False)

    def _refuse(self, error: Refused | NotAsALoop) -> bool:
        """Notes that several microbatches cannot be a round. Returns whether even one cannot."""
        self.refusals += 1
        tell_alone(f"{error}. The round is undone and run again: side effects of fn outside the model happen twice")
        self._alone = isinstance(error, (OutOfOrder, NotAsALoop)) and not isinstance(error, SharedWithEarlier)
        self._looped = not self._alone
        return self._looped

    def _round(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome] | None:
        """Runs forward and backward of a round.

        Returns None after the forward if it has to run again, because recomputed blocks computed something else, or
        modules hold state that has to be watched.
        """
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
        release_workspaces(owner.device)  # so that what is held has one for each microbatch's thread
        before = owner.activation_bytes()
        try:
            try:
                outcomes = this.forward()
                held = owner.activation_bytes() - before
            finally:
                release_workspaces(owner.device)
            if not this.repeats() or this.learn(undo.forward_ended(owner)):
                return None
            overwritten = self._overwritten(decision)
            last.begin()
            this.backward(undo.note_leaves, last.averaging)
            overwritten += self._overwritten(decision)
            late = self._written_late(this)
            if late and decision.size > 1:
                raise NotAsALoop(f"the backward of several microbatches has {late}, in another order than a loop would")
        except RuntimeError as error:
            if decision.size > 1 and _WRITTEN_TO in str(error):
                raise NotAsALoop("several microbatches have written to tensors that backward needs as saved") from error
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
            self._learn_order(this, late, overwritten)
        return outcomes

    def _overwritten(self, decision: Decision) -> list[str]:
        """The parameters that the round's forwards have written to.

        Raises:
            NotAsALoop: There are some, and several microbatches, which may have read each other's numbers.
        """
        names = self._undo.overwritten()
        if names and decision.size > 1:
            raise NotAsALoop(f"several microbatches have written to the parameter '{names[0]}' in their forward")
        return names

    def _learn_order(self, this: Round[Outcome], late: str, overwritten: list[str]) -> None:
        """After a round of one microbatch, decides whether several would act as a loop; if not, warns."""
        if this.draws.turns > 1:
            late = "a microbatch draws from one generator in several turns, or also in its backward"
        elif late:
            late = f"a microbatch's backward has {late}"
        elif this.found_more and self._undo.obstacle(whole=False):
            late = f"its effects around blocks could not be undone: {self._undo.obstacle(whole=False)}"
        elif overwritten:
            late = f"a microbatch has written to the parameter '{overwritten[0]}' in its forward"
        if late:
            self._alone = True
            tell_alone(late)

    def _written_late(self, this: Round[Outcome]) -> str:
        """Effects of a round's backward that several backwards would not have in the order of a loop; empty if none."""
        if this.draws.conflict:
            return f"drawn from {this.draws.conflict}"
        if this.set_late:
            return "set attributes of modules"
        return "changed buffers, or objects that modules hold" if self._undo.backward_has_written() else ""

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
                self._backward(take_root(outcomes[-1]))
        finally:
            torch.set_autocast_cache_enabled(cached)
            caller.restore()
        return outcomes

    def _backward(self, root: Tensor) -> None:
        """Runs the backward of a microbatch that is in no round."""
        self._undo.note_leaves(other_leaves(self._owner, root))
        root.backward()  # type: ignore[no-untyped-call]

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
