"""A rank's updates, from the sums of their gradients to the next version.

The schedule says where an update may begin behind other actions. The run adds four conditions: the sums have ended; the
update is not skipped; the optimizer can step beside other actions; the hosts hold the weights that it reads. If one of
them is not met, the update is made where the schedule ends it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hydra_ext.errors import StateError
from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.microbatches import OwnStage
from hydra_ext.pipeline.ranks.gradients import BatchGradients, Reducer, StageGradients
from hydra_ext.pipeline.ranks.transfers import ROOM, UpdateBehind
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.update import OptimizerStep, steps_behind
from hydra_ext.pipeline.tally import Tally, Waiting
from hydra_ext.schedule import Action, Schedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """An update that has ended.

    Attributes:
        batch: The batch whose gradients it used.
        norm: The norm of the gradients; None without clipping.
        skipped: Whether the weights are unchanged because the norm is not finite.
    """

    batch: int
    norm: float | None
    skipped: bool


@dataclass
class _Pending:
    """The update of one batch, on all of the rank's stages.

    Attributes:
        reduced: Gradients of the stages whose backwards have all run, until the last of the rank's stages adds its own.
        gradients: The gradients of all stages, from then on.
        permitted: Stages, by number, whose update may begin and has not begun.
        begun: By stage, the optimizer steps that run behind other actions.
    """

    batch: Batch
    reduced: list[StageGradients] = field(default_factory=list)
    gradients: BatchGradients | None = None
    permitted: dict[int, OwnStage] = field(default_factory=dict)
    begun: dict[int, OptimizerStep] = field(default_factory=dict)

    def step_of(self, stage: OwnStage, gradients: BatchGradients) -> OptimizerStep | None:
        if stage.optimizer is None or gradients.skipped:
            return None
        settings = self.batch.settings[stage.index]
        return OptimizerStep(stage.optimizer, gradients.of(stage.index), gradients.factor, settings)


class Updates:
    """The updates of all of a rank's stages. The thread that makes the steps owns them.

    Args:
        stages: Number of the rank's stages. The gradients of all of them are reduced together.
        hosts_hold_weights: Whether host parameters hold the weights even while a device computes with them.

    Attributes:
        made: Updates since the last :meth:`take`.
        behind: The last updates that were made behind other actions, at most ``ROOM``.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: int,
        reducer: Reducer,
        watch: Watch,
        tally: Tally,
        waiting: Waiting,
        *,
        hosts_hold_weights: bool,
    ) -> None:
        self.made: list[Update] = []
        self.behind: deque[UpdateBehind] = deque(maxlen=ROOM)
        self._schedule = schedule
        self._stages = stages
        self._reducer = reducer
        self._watch = watch
        self._tally = tally
        self._waiting = waiting
        self._hosts_hold_weights = hosts_hold_weights
        self._pending: dict[int, _Pending] = {}

    # ---- actions ----------------------------------------------------------------------------------------------------

    def reduce(self, action: Action, stage: OwnStage, batch: Batch) -> None:
        """Takes a stage's gradients. The last of the rank's stages starts the reduction of all of them."""
        version = self._schedule.version_of(stage.index, action.batch)
        parameters = [parameter for _, parameter in stage.weights.parameters]
        gradients = StageGradients(stage.index, parameters, stage.weights.take_gradients(version))
        pending = self._pending.setdefault(action.batch, _Pending(batch))
        pending.reduced.append(gradients)
        if len(pending.reduced) < self._stages:
            return
        reduced, pending.reduced = sorted(pending.reduced, key=lambda each: each.stage), []
        pending.gradients = BatchGradients(action.batch, reduced, batch.max_norm)
        self._reducer.start(pending.gradients)

    def permit(self, action: Action, stage: OwnStage, _batch: Batch) -> None:
        """Lets the stage's update begin behind other actions from now on."""
        self._pending[action.batch].permitted[stage.index] = stage

    def begin_permitted(self) -> None:
        """Begins the permitted updates whose sums have ended. They run behind the forward or backward that follows."""
        for pending in self._pending.values():
            gradients = pending.gradients
            if gradients is None or not gradients.done or gradients.skipped:
                continue
            for stage in [each for each in pending.permitted.values() if self._can_step_behind(each)]:
                step = pending.step_of(stage, gradients)
                if step is not None:
                    del pending.permitted[stage.index]
                    pending.begun[stage.index] = step
                    stage.weights.begin(gradients.batch + 1, step.begin)

    def finish(self, action: Action, stage: OwnStage) -> bool:
        """Publishes the stage's next version.

        Returns:
            Whether all of the rank's stages have been updated with the batch's gradients.

        Raises:
            RankFailed: A rank has failed.
            StateError: The schedule has not reduced the gradients before.
        """
        pending = self._pending[action.batch]
        gradients = pending.gradients
        if gradients is None:
            raise StateError(f"the update of batch {action.batch} comes before its gradients: verify() the schedule")
        with self._waiting.measured():
            self._watch.wait_for(lambda: gradients.done)
        pending.permitted.pop(stage.index, None)
        step = pending.begun.pop(stage.index, None) or pending.step_of(stage, gradients)
        stage.weights.update(action.batch + 1, step)
        span = step.wait() if step is not None else None
        if span is not None:
            self.behind.append(UpdateBehind(stage.index, action.batch, *span))
        if step is not None:
            gradients.behind.append(span is not None)
        gradients.stages.remove(gradients.of(stage.index))
        if gradients.stages:
            return False
        del self._pending[action.batch]
        self.made.append(Update(action.batch, gradients.norm, gradients.skipped))
        behind = bool(gradients.behind) and all(gradients.behind)
        self._tally.count_update(skipped=gradients.skipped, behind=behind)
        return True

    # ---- between actions and steps ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits for the steps that have begun, so that between two steps only the user's program changes weights."""
        for step in self._begun():
            step.wait()

    def take(self) -> list[Update]:
        """Returns the updates since the last call, including those that drains have made."""
        made, self.made = self.made, []
        return made

    def warn_of_skipped(self) -> None:
        """Logs a warning for each skipped update that no step will return any more."""
        for update in self.take():
            if update.skipped:
                norm = update.norm
                logger.warning("the update of batch %d was skipped: its gradients' norm is %s", update.batch, norm)

    def _begun(self) -> Iterator[OptimizerStep]:
        for pending in self._pending.values():
            yield from pending.begun.values()

    def _can_step_behind(self, stage: OwnStage) -> bool:
        return self._hosts_hold_weights and steps_behind(stage.optimizer)
