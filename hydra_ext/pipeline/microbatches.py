"""A rank's stages, and the microbatches between their forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hydra_ext.errors import StateError
from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.ranks.links import Inbox, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.stages.modes import Flags, Modes
from hydra_ext.pipeline.stages.tier import Tier
from hydra_ext.pipeline.stages.versions import StageWeights
from hydra_ext.pipeline.tally import Waiting
from hydra_ext.schedule import Action, Schedule
from hydra_ext.split.stage_program import Crossing, StagePass, StageProgram
from hydra_ext.state.layout import copied

_Key = tuple[int, int, int]  # stage, batch and microbatch


@dataclass
class StageLinks:
    """A stage's ends of its links.

    An end is None where there is no such stage, or where that stage is on this rank.

    Attributes:
        inbox, outbox: Ends for activations, from the stage before and to the next one.
        gradient_inbox, gradient_outbox: Ends for gradients, from the next stage and to the one before.
    """

    inbox: Inbox | None = None
    outbox: Outbox | None = None
    gradient_inbox: Inbox | None = None
    gradient_outbox: Outbox | None = None


@dataclass
class OwnStage:
    """A stage on this rank.

    Attributes:
        modes: The modes of the stage's modules.
        optimizer: The stage's optimizer; None if none of its parameters is trained.
    """

    index: int
    program: StageProgram
    weights: StageWeights
    modes: Modes
    optimizer: torch.optim.Optimizer | None
    links: StageLinks = field(default_factory=StageLinks)


class Microbatches:
    """Runs a rank's forwards and backwards, and passes their results on.

    It owns a microbatch's pass from the forward to the backward. It owns a message until the message is sent, or until
    the next stage takes it if that stage is on this rank.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[OwnStage], tier: Tier | None, waiting: Waiting) -> None:
        self._schedule = schedule
        self._alone = len(stages) == 1
        self._tier = tier
        self._waiting = waiting
        self._passes: dict[_Key, tuple[StagePass, Flags]] = {}
        self._leaving: dict[_Key, Message] = {}  # activations, by the stage that takes them
        self._returning: dict[_Key, Message] = {}  # gradients, likewise

    def forward(self, action: Action, stage: OwnStage, batch: Batch) -> None:
        arriving = None
        if stage.index > 0:
            message = self._take(stage.links.inbox, self._leaving, action, batch)
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
            raise StateError(f"stage {stage.index} has neither a loss nor a value for the next stage")
        tensors = leaving.tensors
        if stage.links.outbox is None:  # the next stage is on this rank, and may write to its inputs
            tensors = tuple(copied(tensor) for tensor in tensors)
        message = batch.message(action.microbatch, tensors, leaving.requires_grad, leaving.structure)
        self._leaving[stage.index + 1, action.batch, action.microbatch] = message

    def backward(self, action: Action, stage: OwnStage, batch: Batch) -> None:
        gradients: tuple[Tensor | None, ...] = ()
        if stage.index + 1 < self._schedule.stages:
            gradients = self._take(stage.links.gradient_inbox, self._returning, action, batch).tensors
        stage.weights.show(self._version(action, stage))
        done, modes = self._passes.pop((stage.index, action.batch, action.microbatch))
        with stage.modes.as_at(modes):  # the caller may have called eval() since
            returning = done.backward(gradients)
        if stage.index > 0:
            message = batch.message(action.microbatch, returning)
            self._returning[stage.index - 1, action.batch, action.microbatch] = message

    def receive_activation(self, _action: Action, stage: OwnStage, _batch: Batch) -> None:
        if stage.links.inbox is not None:
            stage.links.inbox.expect()

    def receive_gradient(self, _action: Action, stage: OwnStage, _batch: Batch) -> None:
        if stage.links.gradient_inbox is not None:
            stage.links.gradient_inbox.expect()

    def send_activation(self, action: Action, stage: OwnStage, _batch: Batch) -> None:
        outbox = stage.links.outbox
        if outbox is not None:
            if action.batch < 0 and self._alone:
                # In an evaluation no backward holds a fast stage back. A rank with several stages must not wait: the
                # next stage's rank may wait until a later stage of this rank takes a message.
                outbox.flush()
            outbox.put(self._leaving.pop((stage.index + 1, action.batch, action.microbatch)))

    def send_gradient(self, action: Action, stage: OwnStage, _batch: Batch) -> None:
        if stage.links.gradient_outbox is not None:
            message = self._returning.pop((stage.index - 1, action.batch, action.microbatch))
            stage.links.gradient_outbox.put(message)

    def _version(self, action: Action, stage: OwnStage) -> int:
        return stage.weights.newest if action.batch < 0 else self._schedule.version_of(stage.index, action.batch)

    def _take(self, inbox: Inbox | None, here: dict[_Key, Message], action: Action, batch: Batch) -> Message:
        if inbox is None:
            return here.pop((action.stage, action.batch, action.microbatch))
        with self._waiting.measured():
            message = inbox.take()
        batch.check(message, action)
        return message
