"""A rank's updates, from the sums of their gradients to the next version.

The schedule says from where on an update may be made behind other actions. What only the run knows is looked up here:
whether the sums have ended, whether there is to be an update, whether the optimizer can step beside other actions, and
whether the hosts hold the weights that it reads. Where one of these is not so, the update is made where it ends.
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
    """An update that was made.

    Attributes:
        batch: whose gradients it used.
        norm: of the gradients; None without clipping.
        skipped: nothing was changed, since the norm is not finite.
    """

    batch: int
    norm: float | None
    skipped: bool


@dataclass
class _Pending:
    """The update of one batch, on all of the rank's stages.

    Attributes:
        reduced: of the stages whose backwards have all run, until all of the rank's have.
        gradients: from then on.
        permitted: by number, stages whose update may begin and has not.
        begun: by stage, what is made behind other actions.
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
    """Those of all of a rank's stages.

    Args:
        stages: how many the rank has: the gradients of all of them are reduced together.
        hosts_hold_weights: also while they are computed with.

    Attributes:
        made: since they were last taken.
        behind: the last ones that were made behind other actions.
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
        """The sums begin with the last of the rank's stages."""
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
        """From now on the update may be made behind other actions."""
        self._pending[action.batch].permitted[stage.index] = stage

    def begin_permitted(self) -> None:
        """Before a forward or backward: those whose sums have ended meanwhile run behind it."""
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
        """Publishes the next version. Whether all of the rank's stages have been updated with the batch's gradients."""
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
        """Until what has begun is made, so that between two steps nothing changes but by the user."""
        for step in self._begun():
            step.wait()

    def take(self) -> list[Update]:
        """Those made since the last call, by drains too."""
        made, self.made = self.made, []
        return made

    def warn_of_skipped(self) -> None:
        """Where no step will tell of updates any more."""
        for update in self.take():
            if update.skipped:
                norm = update.norm
                logger.warning("the update of batch %d was skipped: its gradients' norm is %s", update.batch, norm)

    def _begun(self) -> Iterator[OptimizerStep]:
        for pending in self._pending.values():
            yield from pending.begun.values()

    def _can_step_behind(self, stage: OwnStage) -> bool:
        return self._hosts_hold_weights and steps_behind(stage.optimizer)
