"""Runs the steps of one rank of a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hydra_ext.pipeline.assembly import Assembly
from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.executor import Executor
from hydra_ext.pipeline.ranks.gradients import Reducer
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.update import settings_of
from hydra_ext.pipeline.trace import Activity
from hydra_ext.pipeline.updates import Update
from hydra_ext.schedule import Schedule
from hydra_ext.split.stage_program import microbatch_seed
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.split.stages.state_dicts import refuse_while_under_way

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a training has come, after a drain.

    Attributes:
        batches: Number of batches that were admitted. All their updates have been made.
        evaluations: Number of evaluations. Each has random numbers of its own.
        seed: The seed of all random numbers.
        updates: Updates that no step has returned yet.
    """

    batches: int
    evaluations: int
    seed: int
    updates: list[Update]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "updates": [vars(update) for update in self.updates]}


class Engine:
    """One rank's part of the pipeline, from its first step to its end.

    The thread that makes the steps owns it.

    Attributes:
        assembly: The stages, and their connections with the other ranks.
        executor: Runs the actions.
        batches: Number of batches that were admitted.
    """

    def __init__(
        self,
        assembly: Assembly,
        schedule: Schedule,
        topology: Topology,
        watch: Watch,
        device: torch.device,
        *,
        seed: int,
    ) -> None:
        self.batches = 0
        self._evaluations = 0
        self.assembly = assembly
        self.topology = topology
        self.device = device
        self._schedule = schedule
        self._seed = seed
        self._stream = schedule.stream(topology.place)
        self._reducer = Reducer(assembly.partners, watch, topology.rank)
        self.executor = Executor(schedule, assembly.stages, self._reducer, watch, device, assembly.tier)
        self._on_model: RemovableHandle | None = None
        if assembly.parts.model is not None:
            self._on_model = refuse_while_under_way(assembly.parts.model, self.executor.check_idle)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(
        self,
        microbatches: Sequence[Any],
        fn: Callable[..., Any],
        *,
        max_norm: float | None,
        seeds: Sequence[int] | None,
    ) -> tuple[Batch, list[Update]]:
        """Runs this rank's actions of one step; returns the batch, and the updates since the step before."""
        number = self.batches
        if seeds is None:
            seeds = [self.seed_of(number, microbatch) for microbatch in range(len(microbatches))]
        settings = {s.index: settings_of(s.optimizer) for s in self.assembly.stages if s.optimizer is not None}
        batch = Batch(number, microbatches, fn, seeds, len(microbatches), max_norm, settings)
        self.assembly.trained.check()
        for stage in self.assembly.stages:
            stage.weights.check_own()
        actions = self._stream.next_batch(len(microbatches))
        self.batches += 1
        self.executor.admit(batch)
        self.executor.run(actions)
        for stage in self.assembly.stages:
            if stage.optimizer is not None:
                # The update of this step may be made in a later one. Without this mark a learning-rate scheduler
                # would warn that it steps before the optimizer.
                stage.optimizer._opt_called = True  # type: ignore[attr-defined]
        return batch, self.executor.updates.take()

    def evaluate(self, microbatches: Sequence[Any], fn: Callable[..., Any]) -> Batch:
        """Drains, then runs this rank's forwards with the newest weights."""
        self.drain()
        self._evaluations += 1
        number = -1 - self._evaluations
        seeds = [self.seed_of(number, microbatch) for microbatch in range(len(microbatches))]
        batch = Batch(number, microbatches, fn, seeds, 1, None, {})
        self.executor.evaluate(batch, self._stream.evaluation(number, microbatches=len(microbatches)))
        return batch

    def drain(self) -> None:
        """Finishes all microbatches and updates: the modules' parameters are then the newest weights.

        The next step returns these updates.
        """
        with torch.inference_mode(False), torch.enable_grad():  # the actions need gradients, in any mode of the caller
            self.executor.run(self._stream.drain())

    def refresh(self) -> None:
        """Makes the parameters, as they are now, all versions of the weights.

        Raises:
            StateError: Microbatches or updates are under way.
        """
        self.executor.check_idle("refresh()")
        for stage in self.assembly.stages:
            stage.weights.refresh()

    @property
    def progress(self) -> Progress:
        """The counts and the seed that the next step depends on. No microbatch or update may be under way."""
        return Progress(self.batches, self._evaluations, self._seed, list(self.executor.updates.made))

    def delay_of(self, stage: int, batch: int) -> int:
        """How many updates older than W(batch) the weights are that a batch uses on a stage."""
        return batch - self._schedule.version_of(stage, batch)

    def resume(self, progress: Progress) -> None:
        """Makes the next step the one after these batches. No microbatch or update may be under way."""
        self.batches, self._evaluations, self._seed = progress.batches, progress.evaluations, progress.seed
        self.executor.updates.made = list(progress.updates)
        self._stream = self._schedule.stream(self.topology.place, first_batch=progress.batches)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns parameters and buffers of this rank's stages, by name; behind the stage's number for explicit stages.

        A buffer that only another rank keeps up to date is left out.
        """
        state: dict[str, Tensor] = {}
        for part in self.assembly.parts.own:
            state.update((name, parameter.detach()) for name, parameter in part.parameters)
            for module in part.modules:
                prefix = "" if self.assembly.parts.rehearsal is not None else f"{part.stage}."
                buffers = module.named_buffers()
                state.update((prefix + name, buffer) for name, buffer in buffers if not is_absent(buffer))
        return {name: tensor for name, tensor in state.items() if name not in self.assembly.parts.elsewhere}

    def seed_of(self, batch: int, microbatch: int) -> int:
        """The seed of a microbatch's random numbers."""
        return microbatch_seed(self._seed, self.topology.replica, batch, microbatch)

    @property
    def computes_losses(self) -> bool:
        return self.topology.place == self._schedule.stage_rank(self._schedule.stages - 1)

    @property
    def activity(self) -> Activity:
        """The last actions, transfers, reductions and updates of this rank; of each kind at most ``ROOM``."""
        return Activity(
            list(self.executor.timings),
            list(self.assembly.links.transfers),
            list(self._reducer.reductions),
            list(self.executor.updates.behind),
        )

    def flush(self) -> None:
        """Returns when all of this rank's messages have been sent.

        Raises:
            RankFailed: A rank has failed.
        """
        self.assembly.links.flush()

    def close(self, timeout: float) -> None:
        """Ends all threads and connections, even if one of them fails to end. All ranks have to call it.

        Args:
            timeout: Seconds for the threads to end.
        """
        with ExitStack() as stack:  # runs the last callback first
            if self._on_model is not None:
                stack.callback(self._on_model.remove)
            if self.assembly.tier is not None:
                stack.callback(self.assembly.tier.close)
            # After the links: closing them ends the process groups, and so a reduction that waits after a failure.
            stack.callback(self._reducer.close, timeout)
            stack.callback(self.assembly.links.close, timeout)


def common_seed(seed: int | None, watch: Watch) -> int:
    """The first rank's seed, by default its ``torch.initial_seed()``. All ranks have to call it."""
    own = torch.initial_seed() if seed is None else seed
    return int(watch.meet("at the start", int(own))[0]) & (2**63 - 1)
