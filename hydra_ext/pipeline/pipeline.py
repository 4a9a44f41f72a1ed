"""``hydra_ext.Pipeline``: one model over several ranks, in stages."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.pipeline.announcements import Announcements
from hydra_ext.pipeline.assembly import TO_END, MakeOptimizer, assemble
from hydra_ext.pipeline.batch import as_microbatches
from hydra_ext.pipeline.checkpoint.pipeline_checkpoint import PipelineCheckpoint
from hydra_ext.pipeline.choices import check_schedule, choose_device, stage_modules, tier_options
from hydra_ext.pipeline.engine import Engine, common_seed
from hydra_ext.pipeline.output import PipelineOutput
from hydra_ext.pipeline.ranks.together import Together
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.report import PipelineReport, make_report
from hydra_ext.pipeline.stages.parts import Parts, StageModule, explicit_parts
from hydra_ext.pipeline.stages.splitting import split_parts
from hydra_ext.pipeline.trace import Activity, PipelineTrace
from hydra_ext.pipeline.updates import Update
from hydra_ext.policy import Checks, SimulatedDevice
from hydra_ext.schedule import Schedule, make
from hydra_ext.schedule.meaning import norm_comes_in_time
from hydra_ext.schedule.sharing import refuse_late_sums

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded

logger = logging.getLogger(__name__)

_LAST_MESSAGES = 20.0  # seconds that links have to end, when everything has been delivered
_names = itertools.count()


class Pipeline:
    """Trains one model on several ranks, each of which holds some of its blocks.

    torch.distributed has to be initialised, as after ``torchrun``; without it this process is the only rank. Every
    rank makes the same calls with the same microbatches (of its replica).

    Args:
        model: that the ``fn`` of :meth:`step` calls: any module, whole or from :func:`hydra_ext.materialize`. The
            first step finds out what would cross between its blocks, cuts it, and leaves every rank its own part:
            other parameters have no memory afterwards. What several stages hold (tied weights, buffers outside of
            blocks) begins with the numbers of the first of these stages, and each replica with the first one's. To
            cut, ``fn`` is called once more (twice where the model keeps tensors from one microbatch to the next), and
            four times to choose cuts; on all ranks alike, but a counter or an iterator of its own is further on then.
            Generators it draws from are put back.
        optimizer: makes an optimizer for a stage's parameters.
        schedule: ``"2bw"`` (PipeDream-2BW: no bubble; each update uses gradients of the weights before the newest,
            W(t+1) = W(t) - lr * grad f(W(t-1))), ``"1f1b"`` or ``"gpipe"`` (the numbers of plain training, with a
            bubble), ``"pipedream"``, or a :class:`hydra_ext.schedule.Schedule`.
        microbatches: per step and replica.
        stages: how many stages; one for each rank of a line unless given. Or the stages themselves, in place of
            ``model``: modules of which each gets what the one before returned, the first the microbatch; functions
            that build them are called on their own rank only.
        cuts: of ``model``: the blocks at which stages after the first begin, by name (or that of a module around
            them); chosen unless given.
        replicas: lines of ranks that train copies of the model on data of their own; gradients are averaged.
        budget: device bytes of this rank for weights, gradients and activations together. The weights then stay on
            the host, all versions of them, and come to the device block by block, as with :func:`hydra_ext.offload`.
            Without it they are on the device.
        device: where this rank computes; its GPU if it has one, else the CPU, or with a budget a simulated device.
        recompute: keep only what arrives at a stage, and a copy of the microbatch, and run its forward again before
            its backward.
        seed: of all random numbers; the first rank's ``torch.initial_seed()`` unless given.
        patience: seconds after which a rank that gives no sign of life has failed.
        checks: switches for tests, with a budget.

    Raises:
        InvalidArgument: an argument is not of the type given here, or the ranks do not divide into lines.
        InvalidSchedule: the schedule cannot be run so.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: MakeOptimizer,
        *,
        schedule: str | Schedule = "2bw",
        microbatches: int = 8,
        stages: Sequence[StageModule] | int | None = None,
        cuts: Sequence[str | int] | None = None,
        replicas: int = 1,
        budget: int | str | None = None,
        device: torch.device | str | SimulatedDevice | None = None,
        recompute: bool = False,
        seed: int | None = None,
        patience: float = 20.0,
        checks: Checks | None = None,
    ) -> None:
        modules = stage_modules(model, optimizer, stages, cuts)
        self._model = model
        self._make_optimizer = optimizer
        self._cuts = cuts
        self._recompute = recompute
        self._microbatches = microbatches
        self._topology = Topology.here(replicas)
        count = len(modules) if modules else stages if isinstance(stages, int) else self._topology.places
        if not isinstance(schedule, Schedule):
            schedule = make(schedule, stages=count, ranks=self._topology.places, microbatches=microbatches)
        check_schedule(schedule, count, self._topology)
        self.schedule = schedule
        self._tier = tier_options(budget, device, checks)
        self._device = choose_device(device) if self._tier is None else self._tier.place.device
        self._engine: Engine | None = None
        self._announcements: Announcements | None = None
        self._closed = False
        world, name = self._topology.world, f"pipeline {next(_names)}"
        self._watch = Watch(self._topology.rank, world, name, patience=patience, describe=self._describe)
        self._checkpoint = PipelineCheckpoint(Together(self._watch))
        with self._guarded():
            self._seed = common_seed(seed, self._watch)
            if modules:
                home = self._device if self._tier is None else torch.device("cpu")
                parts = explicit_parts(modules, schedule.stages_of(self.place), home)
                refuse_late_sums((("a weight", stages) for stages in parts.shared), schedule)
                self._begin(parts)
        self._at_exit = partial(_call, weakref.WeakMethod(self._abandon))
        atexit.register(self._at_exit)

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
                pipeline was made for. They are the pipeline's until their backwards have run: with "2bw" until the
                next step has returned.
            fn: gets the last stage's value and the microbatch; returns the loss, (loss, metrics) or a mapping with
                "loss".
            max_norm: clip the gradients' norm, taken over all stages, to it; if it is not finite nothing is updated.
            seeds: of the microbatches' random numbers; made from the pipeline's own unless given.

        Raises:
            RankFailed: another rank has failed.
            StateError: the pipeline has ended, or weights were written to.
        """
        self._check_open()
        works = as_microbatches(microbatches, self._microbatches)
        if seeds is not None and len(seeds) != len(works):
            raise InvalidArgument(f"{len(seeds)} seeds for {len(works)} microbatches: give one for each")
        if max_norm is not None and not norm_comes_in_time(self.schedule):
            raise InvalidArgument(
                f"max_norm={max_norm!r}: this schedule updates a stage before all stages have the batch's gradients, "
                "so that there is no norm of the whole model yet: use schedule='2bw', or leave it out"
            )
        with self._guarded():
            engine, announcements = self._begun(works[0], fn)
            batch, updates = engine.step(works, fn, max_norm=max_norm, seeds=seeds)
            output = _output(batch.number, updates)
            announcements.publish(output, batch if engine.computes_losses else None)
            return output

    def evaluate(self, microbatches: Any, fn: Callable[..., Any]) -> PipelineOutput:
        """Losses with the newest weights, without gradients; drains first. All ranks have to call it.

        Training goes on as it would have without. Modes are the modules': call ``model.eval()`` before, and
        ``model.train()`` after, on every rank.

        Args:
            microbatches: as for :meth:`step`.
            fn: as for :meth:`step`.
        """
        self._check_open()
        works = as_microbatches(microbatches, self._microbatches)
        with self._guarded():
            engine, announcements = self._begun(works[0], fn)
            batch = engine.evaluate(works, fn)
            output = PipelineOutput(batch.number, norm=None, skipped=False)
            announcements.publish(output, batch if engine.computes_losses else None)
            return output

    def prepare(self, microbatch: Any, fn: Callable[..., Any]) -> None:
        """What the first step does before anything else: cuts the model, and makes the optimizers. All ranks have to.

        Args:
            microbatch: of the kind that the steps have.
            fn: as for :meth:`step`.

        Raises:
            SplitError: the model cannot be cut.
        """
        self._check_open()
        with self._guarded():
            self._begun(microbatch, fn)

    def drain(self) -> None:
        """Finishes what is under way: afterwards the weights are the newest, W(t) after t steps. All ranks have to
        call it; training goes on as it would have without."""
        self._check_open()
        with self._guarded():
            if self._engine is not None:
                self._engine.drain()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The newest weights and the buffers of this rank's stages, by the model's own names (behind the stage's number
        where stages were given as modules); drains first, so that all ranks have to call it. The tensors are the
        weights themselves.

        Raises:
            StateError: nothing was split yet.
        """
        self.drain()
        if self._engine is None:
            raise StateError("this rank holds nothing before the first step, or prepare(): the model is whole still")
        return self._engine.state_dict()

    def refresh(self) -> None:
        """After writing to the model's weights: they are taken as they are, as both versions. All ranks have to call
        it, after :meth:`drain`."""
        self._check_open()
        with self._guarded():
            if self._engine is not None:
                self._engine.refresh()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        extra: Any = None,
        schedule: Stateful | Sequence[Stateful] | None = None,
        keep: int = 2,
    ) -> Path:
        """Saves all that the next step depends on, as ``folder/step-00001234``; drains first, and is safe when it
        returns. All ranks have to call it, with the same folder.

        Parameters and buffers by the model's own names, as :meth:`state_dict` has them; the optimizers' state by
        parameter, as one optimizer for the whole model would have it; the versions of the weights that steps to come
        use; random states, and the number of steps. So it can be loaded by a pipeline of any number of stages and
        replicas, by :func:`hydra_ext.load_model`, by Hugging Face's ``from_pretrained``, and by ``run.load`` of an
        offloaded run with the same optimizer where no step to come uses older weights.

        Every rank of the first replica writes what it holds, tensor by tensor, into files of its own; the folder has to
        be one that all ranks see. A crash at any moment, of a process or of a machine, leaves the checkpoint before or
        this one whole, and nothing that is whole is ever written over. If a rank fails all of them raise, the
        checkpoints that were there stay, and the pipeline can go on.

        Args:
            folder: of checkpoints; made if it is not there.
            extra: what else is to be kept: None, numbers, texts, and lists and dicts of them. The first rank's counts.
            schedule: of learning rates, for this rank's optimizer; a list for several. All have to be in one state.
            keep: how many checkpoints stay in the folder, this one included; older ones are removed afterwards.

        Returns:
            The checkpoint's own folder.

        Raises:
            StateError: a step is under way, the model is not cut yet, or a parameter has a gradient that no step has
                used.
            InvalidArgument: ``extra`` or ``keep`` is none.
            UnsupportedState: something of the state can be put into no checkpoint.
            SaveFailed: it could not be written.
            RankFailed: another rank has failed.
        """
        engine = self._at_rest("pipe.save")
        return self._checkpoint.save(engine, Path(folder), schedule, extra=extra, keep=keep)

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        strict: bool = True,
        schedule: Stateful | Sequence[Stateful] | None = None,
    ) -> Loaded | None:
        """Goes on from the newest checkpoint in a folder: the next step has the bits that it would have had. All ranks
        have to call it, and see the same folder; a plain model has to be cut before, by :meth:`prepare`.

        Every rank reads what it holds, of a checkpoint of any number of stages and replicas, or of ``run.save``. Before
        anything is changed all have agreed on one checkpoint, and each has checked every byte that it will read. The
        pipeline's ``seed`` becomes that of the checkpoint. Gradients are dropped.

        Args:
            folder: of checkpoints, into which another process may be saving, or one checkpoint.
            strict: if the newest one is damaged, raise; else take the newest that is whole, and log a warning.
            schedule: what :meth:`save` was given.

        Returns:
            What was loaded; None if there is no checkpoint, or no such folder: the training begins.

        Raises:
            CheckpointError: it is damaged, or was removed before it could be read; on all ranks, with the first
                file and tensor that is damaged.
            CheckpointMismatch: it is of another model or optimizer, or of a schedule whose steps use older weights than
                this one's, or newer ones; the error lists all differences.
            StateError: a step is under way, or the model is not cut yet.
            UnsupportedState: no checkpoint can hold the state of this model or optimizer.
            RankFailed: another rank has failed.
        """
        return self._checkpoint.load(self._at_rest("pipe.load"), Path(folder), schedule, strict=strict)

    def report(self) -> PipelineReport:
        """What this rank holds and has done so far; at any time, and of this rank alone."""
        return make_report(self.schedule, self._topology, self._engine)

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """A context that writes what this rank does in it to ``path`` on leaving it, after an error too.

        The file opens in https://ui.perfetto.dev. Of several ranks each writes its own, ``step.json`` becoming
        ``step.rank0.json``, and so on; their clock is the machines' time of day, so that they can be put together:
        ``jq -s '{traceEvents: map(.traceEvents) | add}' step.rank*.json > step.json``. What is under way when the
        context is left is not in it: :meth:`drain` before, to have all of a step with ``"2bw"``.

        Raises:
            TraceFileError: there can be no such file.
        """
        return PipelineTrace(path, self.schedule, self._topology, self._activity)

    def close(self) -> None:
        """Drains, and ends the pipeline on all ranks, which all have to call it; waits for those that still live.

        Raises:
            RankFailed: another rank has failed, or has ended without this. After an error that said so before only the
                rest is ended.
        """
        if self._closed:
            return
        failure = self._watch.failure
        try:
            if failure is None:
                self._finish()
        finally:
            self._end(_LAST_MESSAGES if self._watch.failure is None else TO_END)
        if failure is not None and not self._watch.told:
            raise failure.error()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._watch.failure is None:
            self._watch.fail_with(error)
        self._end(TO_END)

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
        """Of this rank's stages that are trained.

        Raises:
            StateError: there are none before the first step, or :meth:`prepare`.
        """
        if self._engine is None:
            raise StateError("the optimizers are made by the first step: call pipe.prepare(microbatch, fn) before")
        return [stage.optimizer for stage in self._engine.assembly.stages if stage.optimizer is not None]

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this pipeline has ended: make a new one")
        self._watch.check()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """The other ranks are told of an error, unless it is another rank's failure that has come here."""
        try:
            yield
        except BaseException as error:  # re-raised
            self._watch.told = True
            self._watch.fail_with(error)
            raise

    def _at_rest(self, asked: str) -> Engine:
        if self._engine is None:
            raise StateError(f"{asked}: the model is not cut yet: call pipe.prepare(microbatch, fn) before")
        self._engine.executor.check_between_steps(asked)
        self.drain()
        return self._engine

    def _begun(self, microbatch: Any, fn: Callable[..., Any]) -> tuple[Engine, Announcements]:
        if self._engine is None or self._announcements is None:
            if self._model is None:
                raise StateError("this pipeline has not begun")
            parts = split_parts(
                self._model,
                fn,
                microbatch,
                schedule=self.schedule,
                topology=self._topology,
                watch=self._watch,
                device=self._device,
                home=self._device if self._tier is None else torch.device("cpu"),
                cuts=self._cuts,
                seed=self._seed,
            )
            return self._begin(parts)
        return self._engine, self._announcements

    def _begin(self, parts: Parts) -> tuple[Engine, Announcements]:
        assembly = assemble(
            parts,
            self._make_optimizer,
            self.schedule,
            self._topology,
            self._watch,
            self._device,
            recompute=self._recompute,
            budget=self._tier,
        )
        engine = Engine(assembly, self.schedule, self._topology, self._watch, self._device, seed=self._seed)
        announcements = Announcements(assembly.losses, assembly.loss_listeners, engine.executor.tally)
        self._engine, self._announcements = engine, announcements
        return engine, announcements

    def _finish(self) -> None:
        """Until no rank needs anything of another's any more."""
        self.drain()
        if self._engine is not None:
            self._engine.executor.updates.warn_of_skipped()
        with self._guarded():
            if self._engine is not None and self._announcements is not None:
                self._announcements.finish()
                self._engine.flush()
            self._watch.part()

    def _activity(self) -> Activity:
        return Activity([], [], [], []) if self._engine is None else self._engine.activity

    def _describe(self) -> str:
        return "at the start" if self._engine is None else self._engine.executor.describe()

    def _abandon(self) -> None:
        """When Python ends."""
        if not self._closed:
            if self._engine is not None and self._watch.failure is None:
                logger.warning("the pipeline was not closed: updates that were under way are not in the weights")
            self._end(1.0)

    def _end(self, timeout: float) -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            if self._engine is not None:
                self._engine.close(timeout)
        finally:
            self._watch.end()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()


def _output(batch: int, updates: Sequence[Update]) -> PipelineOutput:
    norm = updates[-1].norm if updates else None
    return PipelineOutput(batch, norm=norm, skipped=any(update.skipped for update in updates))
