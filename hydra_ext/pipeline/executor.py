"""Runs one rank's actions: the schedule says which, in what order; nothing is decided here."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ext.errors import StateError
from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.ranks.gradients import BatchGradients, Reducer, StageGradients
from hydra_ext.pipeline.ranks.links import Inbox, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.modes import Flags, Modes
from hydra_ext.pipeline.stages.tier import Tier
from hydra_ext.pipeline.stages.update import OptimizerStep, steps_behind
from hydra_ext.pipeline.stages.versions import StageWeights
from hydra_ext.pipeline.tally import Tally
from hydra_ext.pipeline.transfers import ROOM, UpdateBehind
from hydra_ext.runtime.rounds.isolation import Surroundings
from hydra_ext.schedule import Action, ActionKind, Schedule
from hydra_ext.split.stage_program import Crossing, StagePass, StageProgram
from hydra_ext.state.layout import copied
from hydra_ext.state.randomness import host_randomness_kept

logger = logging.getLogger(__name__)

_NAMES = {
    ActionKind.FORWARD: "in the forward of",
    ActionKind.BACKWARD: "in the backward of",
    ActionKind.REDUCE: "after the last backward of",
    ActionKind.BEGIN_UPDATE: "before the update with",
    ActionKind.UPDATE: "in the update with",
    ActionKind.SEND_ACTIVATION: "after the forward of",
    ActionKind.RECEIVE_ACTIVATION: "before the forward of",
    ActionKind.SEND_GRADIENT: "after the backward of",
    ActionKind.RECEIVE_GRADIENT: "before the backward of",
}


@dataclass
class OwnStage:
    """A stage on this rank.

    Attributes:
        modes: of its modules.
        optimizer: None where nothing of the stage is trained.
        inbox, outbox: activations from the stage before, and to the next; None at the ends, and where that stage is
            on this rank too.
        gradient_inbox, gradient_outbox: likewise, of gradients, from the next stage and to the one before.
    """

    index: int
    program: StageProgram
    weights: StageWeights
    modes: Modes
    optimizer: torch.optim.Optimizer | None
    inbox: Inbox | None = None
    outbox: Outbox | None = None
    gradient_inbox: Inbox | None = None
    gradient_outbox: Outbox | None = None


@dataclass(frozen=True)
class Update:
    """An update that was made.

    Attributes:
        batch: whose gradients it used.
        norm: of the gradients; None without clipping.
        skipped: nothing was changed, since the norm is not finite.
    """

    batch: int
    norm: float | None
    skipped: bool


@dataclass(frozen=True)
class Timing:
    """One action, in seconds of ``time.perf_counter``; ``waited`` of them for what had to arrive."""

    action: Action
    start: float
    end: float
    waited: float


class Executor:
    """One rank's part of the pipeline.

    Attributes:
        updates: made since they were last taken.
        timings: of the last actions, the one that has failed included; bounded.
        behind: the last updates that were made behind other actions.
        tally: of all actions.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[OwnStage],
        reducer: Reducer,
        watch: Watch,
        device: torch.device,
        tier: Tier | None = None,
    ) -> None:
        self.updates: list[Update] = []
        self.timings: deque[Timing] = deque(maxlen=ROOM)
        self.behind: deque[UpdateBehind] = deque(maxlen=ROOM)
        self.tally = Tally(stage.index for stage in stages)
        self._schedule = schedule
        self._stages = {stage.index: stage for stage in stages}
        self._reducer = reducer
        self._watch = watch
        self._device = device
        self._tier = tier
        self._batches: dict[int, Batch] = {}
        self._passes: dict[tuple[int, int, int], tuple[StagePass, Flags]] = {}
        self._leaving: dict[tuple[int, int, int], Message] = {}
        self._returning: dict[tuple[int, int, int], Message] = {}
        self._reduced: dict[int, list[StageGradients]] = {}
        self._gradients: dict[int, BatchGradients] = {}
        self._begun: dict[tuple[int, int], OptimizerStep] = {}  # by stage and batch
        self._at: Action | None = None
        self._waited = 0.0
        self._run_kind: dict[ActionKind, Callable[[Action, OwnStage], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.REDUCE: self._reduce,
            ActionKind.BEGIN_UPDATE: lambda *_: None,
            ActionKind.UPDATE: self._update,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECEIVE_ACTIVATION: self._expect_activation,
            ActionKind.SEND_GRADIENT: self._send_gradient,
            ActionKind.RECEIVE_GRADIENT: self._expect_gradient,
        }

    # ---- for the pipeline -------------------------------------------------------------------------------------------

    def admit(self, batch: Batch) -> None:
        """Its actions come from now on."""
        self._batches[batch.number] = batch

    def run(self, actions: Iterable[Action]) -> None:
        """Afterwards the modules have the user's own parameters, and the caller's random state is as it was."""
        caller = Surroundings(self._device)
        start = time.perf_counter()
        try:
            with host_randomness_kept():
                for action in actions:
                    if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                        self._begin_updates()
                    self._run_one(action)
            self._at = None
        finally:
            try:
                for step in self._begun.values():
                    step.wait()  # so that between two steps nothing changes but by the user
            finally:  # it may be interrupted
                caller.restore()
                for stage in self._stages.values():
                    stage.weights.hide()
                self.tally.count_step(time.perf_counter() - start)

    def _run_one(self, action: Action) -> None:
        self._at = action
        self._watch.moved()
        self._waited = 0.0
        start = time.perf_counter()
        try:
            self._run_kind[action.kind](action, self._stages[action.stage])
        finally:
            end = time.perf_counter()
            self.timings.append(Timing(action, start, end, self._waited))
            self.tally.count_action(action, end - start, self._waited)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited = time.perf_counter() - start

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> None:
        """Forwards only, with the newest weights; nothing may be under way. Its number is below -1."""
        self._batches[batch.number] = batch
        numbers = range(len(batch.microbatches))
        for index in sorted(self._stages):
            ahead = self._evaluation(ActionKind.RECEIVE_ACTIVATION, index, batch, numbers[:1])
            for number in numbers:
                ahead += self._evaluation(ActionKind.RECEIVE_ACTIVATION, index, batch, numbers[number + 1 : number + 2])
                ahead += self._evaluation(ActionKind.FORWARD, index, batch, [number])
                ahead += self._evaluation(ActionKind.SEND_ACTIVATION, index, batch, [number])
            self.run(ahead)
        del self._batches[batch.number]

    def _evaluation(self, kind: ActionKind, stage: int, batch: Batch, numbers: Iterable[int]) -> list[Action]:
        if kind != ActionKind.FORWARD and (stage if kind == ActionKind.RECEIVE_ACTIVATION else stage + 1) not in range(
            1, self._schedule.stages
        ):
            return []
        return [Action(kind, stage=stage, batch=batch.number, microbatch=number) for number in numbers]

    def _version(self, action: Action, stage: OwnStage) -> int:
        return stage.weights.newest if action.batch < 0 else self._schedule.version_of(stage.index, action.batch)

    def describe(self) -> str:
        """Where this rank is, for the others; from any thread."""
        action = self._at
        if action is None:
            return f"between two steps, in stage {', '.join(map(str, sorted(self._stages)))}"
        what = f"batch {action.batch}"
        if action.kind not in (ActionKind.REDUCE, ActionKind.BEGIN_UPDATE, ActionKind.UPDATE):
            what = f"microbatch {action.microbatch} of {what}"
        return f"{_NAMES[action.kind]} {what} in stage {action.stage}"

    def check_idle(self, asked: str) -> None:
        """
        Raises:
            StateError: microbatches or updates are under way.
        """
        if self._batches:
            raise StateError(
                f"{asked} while batch {min(self._batches)} is under way: call drain() before, on every rank"
            )

    def check_between_steps(self, asked: str) -> None:
        """
        Raises:
            StateError: this rank's actions are being run.
        """
        if self._at is not None:
            raise StateError(f"{asked} was called {self.describe()}: call it between two steps")

    def take_updates(self) -> list[Update]:
        """Those made since the last call, by drains too."""
        made, self.updates = self.updates, []
        return made

    def warn_of_skipped(self) -> None:
        """Where no step will tell of updates any more."""
        for update in self.take_updates():
            if update.skipped:
                norm = update.norm
                logger.warning("the update of batch %d was skipped: its gradients' norm is %s", update.batch, norm)

    # ---- forward and backward ---------------------------------------------------------------------------------------

    def _forward(self, action: Action, stage: OwnStage) -> None:
        batch = self._batches[action.batch]
        arriving = None
        if stage.index > 0:
            message = self._take(stage.inbox, self._leaving, action)
            tensors = tuple(tensor for tensor in message.tensors if tensor is not None)
            if self._tier is not None:
                tensors = self._tier.admit(tensors)
            arriving = Crossing(tensors, message.requires_grad, message.structure)
        stage.weights.show(self._version(action, stage))
        done = stage.program.forward(
            batch.fn,
            batch.microbatches[action.microbatch],
            arriving,
            seed=batch.seeds[action.microbatch],
            divisor=batch.divisor,
        )
        if action.batch >= 0:  # an evaluation's has no backward
            self._passes[stage.index, action.batch, action.microbatch] = done, stage.modes.now()
        if done.loss is not None:
            batch.losses[action.microbatch] = done.loss
            batch.metrics[action.microbatch] = done.metrics
            return
        leaving = done.leaving
        if leaving is None:
            raise StateError(f"stage {stage.index} has neither a loss nor anything to hand on")
        tensors = leaving.tensors
        if stage.outbox is None:  # the next stage is here, and may write to what it gets
            tensors = tuple(copied(tensor) for tensor in tensors)
        message = batch.message(action.microbatch, tensors, leaving.requires_grad, leaving.structure)
        self._leaving[stage.index + 1, action.batch, action.microbatch] = message

    def _backward(self, action: Action, stage: OwnStage) -> None:
        gradients: tuple[Tensor | None, ...] = ()
        if stage.index + 1 < self._schedule.stages:
            gradients = self._take(stage.gradient_inbox, self._returning, action).tensors
        stage.weights.show(self._schedule.version_of(stage.index, action.batch))
        done, modes = self._passes.pop((stage.index, action.batch, action.microbatch))
        with stage.modes.as_at(modes):  # the caller may have called eval() since
            returning = done.backward(gradients)
        if stage.index > 0:
            message = self._batches[action.batch].message(action.microbatch, returning)
            self._returning[stage.index - 1, action.batch, action.microbatch] = message

    # ---- communication ----------------------------------------------------------------------------------------------

    def _take(self, inbox: Inbox | None, here: dict[tuple[int, int, int], Message], action: Action) -> Message:
        if inbox is None:
            return here.pop((action.stage, action.batch, action.microbatch))
        with self._waiting():
            message = inbox.take()
        self._batches[action.batch].check(message, action)
        return message

    def _expect_activation(self, _: Action, stage: OwnStage) -> None:
        if stage.inbox is not None:
            stage.inbox.expect()

    def _expect_gradient(self, _: Action, stage: OwnStage) -> None:
        if stage.gradient_inbox is not None:
            stage.gradient_inbox.expect()

    def _send_activation(self, action: Action, stage: OwnStage) -> None:
        if stage.outbox is not None:
            if action.batch < 0 and len(self._stages) == 1:
                # No backward holds a fast stage back. A rank of several must not wait: the next stage's rank may be
                # waiting for what a later stage of this one is to take.
                stage.outbox.flush()
            stage.outbox.put(self._leaving.pop((stage.index + 1, action.batch, action.microbatch)))

    def _send_gradient(self, action: Action, stage: OwnStage) -> None:
        if stage.gradient_outbox is not None:
            stage.gradient_outbox.put(self._returning.pop((stage.index - 1, action.batch, action.microbatch)))

    # ---- updates ----------------------------------------------------------------------------------------------------

    def _reduce(self, action: Action, stage: OwnStage) -> None:
        version = self._schedule.version_of(stage.index, action.batch)
        parameters = [parameter for _, parameter in stage.weights.parameters]
        gradients = StageGradients(stage.index, parameters, stage.weights.take_gradients(version))
        reduced = self._reduced.setdefault(action.batch, [])
        reduced.append(gradients)
        if len(reduced) < len(self._stages):
            return
        reduced.sort(key=lambda each: each.stage)
        batch = BatchGradients(action.batch, self._reduced.pop(action.batch), self._batches[action.batch].max_norm)
        self._gradients[action.batch] = batch
        self._reducer.start(batch)

    def _begin_updates(self) -> None:
        """Of gradients that have been reduced while other microbatches were under way."""
        for gradients in self._gradients.values():
            if gradients.done and not gradients.skipped:
                for own in gradients.stages:
                    stage = self._stages[own.stage]
                    if (own.stage, gradients.batch) not in self._begun and self._can_begin(stage, gradients.batch):
                        step = self._step_of(stage, gradients)
                        if step is not None:
                            self._begun[own.stage, gradients.batch] = step
                            stage.weights.begin(gradients.batch + 1, step.begin)

    def _can_begin(self, stage: OwnStage, batch: int) -> bool:
        """The memory that the update of this batch writes to is used by none of the later ones."""
        alive = self._schedule.versions[stage.index]
        oldest = min((self._schedule.version_of(stage.index, n) for n in self._batches if n > batch), default=batch + 1)
        ready = stage.weights.newest == batch and oldest > batch + 1 - alive
        readable = self._tier is None or self._tier.hosts_hold_weights
        return alive > 1 and ready and readable and steps_behind(stage.optimizer)

    def _step_of(self, stage: OwnStage, gradients: BatchGradients) -> OptimizerStep | None:
        if stage.optimizer is None or gradients.skipped:
            return None
        settings = self._batches[gradients.batch].settings[stage.index]
        return OptimizerStep(stage.optimizer, gradients.of(stage.index), gradients.factor, settings)

    def _update(self, action: Action, stage: OwnStage) -> None:
        gradients = self._gradients[action.batch]
        with self._waiting():
            self._watch.wait_for(lambda: gradients.done)
        step = self._begun.pop((stage.index, action.batch), None) or self._step_of(stage, gradients)
        stage.weights.update(action.batch + 1, step)
        span = step.wait() if step is not None else None
        if span is not None:
            self.behind.append(UpdateBehind(stage.index, action.batch, *span))
        if step is not None:
            gradients.behind.append(span is not None)
        gradients.stages.remove(gradients.of(stage.index))
        if not gradients.stages:  # all of this rank's stages have been updated
            del self._gradients[action.batch], self._batches[action.batch]
            self.updates.append(Update(action.batch, gradients.norm, gradients.skipped))
            behind = bool(gradients.behind) and all(gradients.behind)
            self.tally.count_update(skipped=gradients.skipped, behind=behind)
