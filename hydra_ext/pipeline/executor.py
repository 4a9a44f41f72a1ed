"""Runs one rank's actions in the order of the schedule, which makes all decisions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from hydra_ext.errors import StateError
from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.microbatches import Microbatches, OwnStage
from hydra_ext.pipeline.ranks.gradients import Reducer
from hydra_ext.pipeline.ranks.transfers import ROOM
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.tier import Tier
from hydra_ext.pipeline.tally import Tally, Waiting
from hydra_ext.pipeline.updates import Updates
from hydra_ext.runtime.rounds.isolation import Surroundings
from hydra_ext.schedule import Action, ActionKind, Schedule
from hydra_ext.state.randomness import host_randomness_kept

_COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD)
_LONG = (*_COMPUTES, ActionKind.UPDATE)  # a thread that is woken for the others would hold them up
_OF_BATCHES = (ActionKind.REDUCE, ActionKind.BEGIN_UPDATE, ActionKind.UPDATE)
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


@dataclass(frozen=True)
class Timing:
    """The time of one action, in seconds of ``time.perf_counter``.

    Attributes:
        waited: Seconds at its start in which the action waited for other ranks.
    """

    action: Action
    start: float
    end: float
    waited: float


class Executor:
    """Runs the actions of one rank.

    Attributes:
        updates: The updates of the rank's stages.
        timings: Times of the last ``ROOM`` actions, including one that raised.
        tally: Times and counts of all actions.
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
        self.timings: deque[Timing] = deque(maxlen=ROOM)
        self.tally = Tally(stage.index for stage in stages)
        self._waiting = Waiting()
        self.updates = Updates(
            schedule,
            len(stages),
            reducer,
            watch,
            self.tally,
            self._waiting,
            hosts_hold_weights=tier is None or tier.hosts_hold_weights,
        )
        self._stages = {stage.index: stage for stage in stages}
        self._watch = watch
        self._device = device
        self._batches: dict[int, Batch] = {}
        self._at: Action | None = None
        microbatches = Microbatches(schedule, stages, tier, self._waiting)
        self._run_kind: dict[ActionKind, Callable[[Action, OwnStage, Batch], None]] = {
            ActionKind.FORWARD: microbatches.forward,
            ActionKind.BACKWARD: microbatches.backward,
            ActionKind.REDUCE: self.updates.reduce,
            ActionKind.BEGIN_UPDATE: self.updates.permit,
            ActionKind.UPDATE: self._finish_update,
            ActionKind.SEND_ACTIVATION: microbatches.send_activation,
            ActionKind.RECEIVE_ACTIVATION: microbatches.receive_activation,
            ActionKind.SEND_GRADIENT: microbatches.send_gradient,
            ActionKind.RECEIVE_GRADIENT: microbatches.receive_gradient,
        }

    # ---- for the pipeline -------------------------------------------------------------------------------------------

    def admit(self, batch: Batch) -> None:
        """Takes a batch, whose actions may run from now on."""
        self._batches[batch.number] = batch

    def run(self, actions: Iterable[Action]) -> None:
        """Runs actions. Afterwards the modules show the user's own parameters, and random state is the caller's.

        Threads that make updates have ended.
        """
        caller = Surroundings(self._device)
        start = time.perf_counter()
        try:
            with host_randomness_kept():
                for action in actions:
                    if action.kind in _COMPUTES:
                        self.updates.begin_permitted()
                    self._run_one(action)
            self._at = None
        finally:
            try:
                self.updates.wait()
            finally:  # an interrupt may end the wait
                caller.restore()
                for stage in self._stages.values():
                    stage.weights.hide()
                self.tally.count_step(time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self, batch: Batch, actions: Iterable[Action]) -> None:
        """Runs the actions of an evaluation, without gradients.

        No other batch may be under way.

        Args:
            batch: An evaluation's, with a number below -1.
            actions: The stream's actions for that number.
        """
        self.admit(batch)
        self.run(actions)
        del self._batches[batch.number]

    def describe(self) -> str:
        """Where this rank is, as a text for the other ranks. Any thread may call it."""
        action = self._at
        if action is None:
            return f"between two steps, in stage {', '.join(map(str, sorted(self._stages)))}"
        what = f"batch {action.batch}"
        if action.kind not in _OF_BATCHES:
            what = f"microbatch {action.microbatch} of {what}"
        return f"{_NAMES[action.kind]} {what} in stage {action.stage}"

    def check_idle(self, asked: str) -> None:
        """
        Raises:
            StateError: Microbatches or updates are under way.
        """
        if self._batches:
            raise StateError(
                f"{asked} while batch {min(self._batches)} is under way: call drain() before, on every rank"
            )

    def check_between_steps(self, asked: str) -> None:
        """
        Raises:
            StateError: This rank's actions are running.
        """
        if self._at is not None:
            raise StateError(f"{asked} was called {self.describe()}: call it between two steps")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _run_one(self, action: Action) -> None:
        self._at = action
        if action.kind in _LONG:
            self._watch.moved()
        self._waiting.seconds = 0.0
        start = time.perf_counter()
        try:
            self._run_kind[action.kind](action, self._stages[action.stage], self._batches[action.batch])
        finally:
            end = time.perf_counter()
            self.timings.append(Timing(action, start, end, self._waiting.seconds))
            self.tally.count_action(action, end - start, self._waiting.seconds)

    def _finish_update(self, action: Action, stage: OwnStage, _batch: Batch) -> None:
        if self.updates.finish(action, stage):
            del self._batches[action.batch]
