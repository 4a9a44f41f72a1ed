"""``hydra_ext.Pipeline``: one model over several ranks, in stages."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument, RankFailed, StateError
from hydra_ext.pipeline.announcements import Announcements
from hydra_ext.pipeline.batches import as_microbatches
from hydra_ext.pipeline.engine import Engine, MakeOptimizer
from hydra_ext.pipeline.executor import Update
from hydra_ext.pipeline.output import PipelineOutput
from hydra_ext.pipeline.parts import StageModule, explicit_parts
from hydra_ext.pipeline.topology import Topology
from hydra_ext.pipeline.watch import Failure, Watch, describe_error
from hydra_ext.schedule import Schedule, make

logger = logging.getLogger(__name__)

_LAST_MESSAGES = 20.0  # seconds that the end waits for what is under way
_names = itertools.count()


class Pipeline:
    """Trains one model on several ranks, each of which holds some of its blocks.

    torch.distributed has to be initialised, as after ``torchrun``; without it this process is the only rank. Every
    rank makes the same calls with the same microbatches (of its replica).

    Args:
        stages: modules, one per stage, of which each gets what the one before returned, or functions that build them:
            a rank calls those of its own stages only. The first gets the microbatch.
        optimizer: makes an optimizer for a stage's parameters.
        schedule: ``"2bw"`` (PipeDream-2BW: no bubble; each update uses gradients of the weights before the newest,
            W(t+1) = W(t) - lr * grad f(W(t-1))), ``"1f1b"`` or ``"gpipe"`` (the numbers of plain training, with a
            bubble), ``"pipedream"``, or a :class:`hydra_ext.schedule.Schedule`.
        microbatches: per step and replica.
        replicas: lines of ranks that train copies of the model on data of their own; gradients are averaged.
        device: where this rank computes; its GPU if it has one, else the CPU.
        recompute: keep only what arrives at a stage, and run its forward again before its backward.
        seed: of all random numbers; the first rank's ``torch.initial_seed()`` unless given.
        patience: seconds after which a rank that gives no sign of life has failed.

    Attributes:
        rank, place, replica: this one's number, its place in its line, and its line.
        schedule: what is run.

    Raises:
        InvalidArgument: an argument is not of the type given here, or the ranks do not divide into lines.
        InvalidSchedule: the schedule cannot be run so.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        optimizer: MakeOptimizer,
        *,
        schedule: str | Schedule = "2bw",
        microbatches: int = 8,
        replicas: int = 1,
        device: torch.device | str | None = None,
        recompute: bool = False,
        seed: int | None = None,
        patience: float = 20.0,
    ) -> None:
        if not callable(optimizer):
            raise InvalidArgument(
                f"optimizer={optimizer!r}: give a function that makes an optimizer for the parameters it gets, such as "
                "lambda params: hydra_ext.optim.AdamW(params, lr=3e-4)"
            )
        self._topology = Topology.here(replicas)
        self._microbatches = microbatches
        modules = list(stages)
        if not isinstance(schedule, Schedule):
            schedule = make(schedule, stages=len(modules), ranks=self._topology.places, microbatches=microbatches)
        self.schedule = schedule
        self._device = choose_device(device)
        self._engine: Engine | None = None
        self._closed = False
        self._watch = Watch(
            self._topology.rank,
            self._topology.world,
            f"pipeline {next(_names)}",
            patience=patience,
            describe=self._describe,
        )
        try:
            parts = explicit_parts(modules, self.schedule.stages_of(self._topology.place), self._device)
            self._engine = Engine(
                parts,
                optimizer,
                self.schedule,
                self._topology,
                self._watch,
                self._device,
                seed=seed,
                recompute=recompute,
            )
        except BaseException as error:  # re-raised
            self._fail(error)
            raise
        self._announcements = Announcements(self._engine.announcements, self._engine.announcers)
        self._at_exit = weakref.WeakMethod(self._abandon)
        atexit.register(_call, self._at_exit)

    # ---- for users --------------------------------------------------------------------------------------------------

    def step(
        self,
        microbatches: Any,
        fn: Callable[..., Any],
        *,
        max_norm: float | None = None,
        seeds: Sequence[int] | None = None,
    ) -> PipelineOutput:
        """One training step.

        Args:
            microbatches: a list of microbatches, or a tensor or a mapping of tensors that is cut into as many as the
                pipeline was made for.
            fn: gets the last stage's value and the microbatch; returns the loss, (loss, metrics) or a mapping with
                "loss".
            max_norm: clip the gradients' norm, taken over all stages, to it; if it is not finite nothing is updated.
            seeds: of the microbatches' random numbers; made from the pipeline's own unless given.

        Raises:
            RankFailed: another rank has failed.
            StateError: the pipeline has ended, or weights were written to.
        """
        engine = self._usable()
        works = as_microbatches(microbatches, self._microbatches)
        if seeds is not None and len(seeds) != len(works):
            raise InvalidArgument(f"{len(seeds)} seeds for {len(works)} microbatches: give one for each")
        try:
            output_losses, updates = engine.step(works, fn, max_norm=max_norm, seeds=seeds)
            output = self._output(output_losses.number, updates)
            if engine.computes_losses:
                self._announcements.announce(output, output_losses.losses, output_losses.metrics)
            else:
                self._announcements.expect(output)
            return output
        except BaseException as error:  # re-raised
            self._fail(error)
            raise

    def drain(self) -> None:
        """Finishes what is under way: afterwards the weights are the newest, W(t) after t steps. All ranks have to
        call it; training goes on as it would have without."""
        engine = self._usable()
        try:
            engine.drain()
        except BaseException as error:  # re-raised
            self._fail(error)
            raise

    def close(self) -> None:
        """Drains, and ends the pipeline on all ranks, which all have to call it."""
        if self._closed:
            return
        if self._watch.failure is None:
            self.drain()
        self._end(_LAST_MESSAGES)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)
            self._end(0.0)

    @property
    def rank(self) -> int:
        return self._topology.rank

    @property
    def place(self) -> int:
        return self._topology.place

    @property
    def replica(self) -> int:
        return self._topology.replica

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of this rank's stages that are trained."""
        engine = self._usable()
        return [stage.optimizer for stage in engine.stages if stage.optimizer is not None]

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _usable(self) -> Engine:
        if self._engine is None or self._closed:
            raise StateError("this pipeline has ended: make a new one")
        self._watch.check()
        return self._engine

    def _output(self, batch: int, updates: Sequence[Update]) -> PipelineOutput:
        norm = updates[-1].norm if updates else None
        return PipelineOutput(batch, norm=norm, skipped=any(update.skipped for update in updates))

    def _describe(self) -> str:
        return "at the start" if self._engine is None else self._engine.executor.describe()

    def _fail(self, error: BaseException) -> None:
        """The other ranks are told, unless it is another rank's failure that has come here."""
        if isinstance(error, RankFailed) and self._watch.failure is not None:
            return
        self._watch.fail(Failure(self._topology.rank, self._describe(), describe_error(error)))

    def _abandon(self) -> None:
        """When Python ends."""
        if not self._closed:
            if self._engine is not None and self._watch.failure is None:
                logger.warning("the pipeline was not closed: updates that were under way are not in the weights")
            self._end(1.0)

    def _end(self, timeout: float) -> None:
        self._closed = True
        atexit.unregister(_call)
        if self._engine is not None:
            self._engine.close(timeout)
        self._watch.end()


def choose_device(device: torch.device | str | None) -> torch.device:
    """The one given, else this rank's GPU if there is one, else the CPU."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()


def check_module(value: object) -> bool:
    return isinstance(value, nn.Module)
