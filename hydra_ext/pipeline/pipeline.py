"""``hydra_ext.Pipeline``: trains one model, cut into stages, on several ranks."""

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
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.pipeline.announcements import Announcements
from hydra_ext.pipeline.assembly import TO_END, MakeOptimizer, assemble
from hydra_ext.pipeline.checkpoint.pipeline_checkpoint import PipelineCheckpoint
from hydra_ext.pipeline.choices import choose_device, stage_modules, tier_options
from hydra_ext.pipeline.engine import Engine, common_seed
from hydra_ext.pipeline.output import PipelineOutput
from hydra_ext.pipeline.planning.automatic import check_plan, planned_layout
from hydra_ext.pipeline.planning.layout import Given, Layout, given_layout
from hydra_ext.pipeline.ranks.together import Together
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.report import PipelineReport, make_report
from hydra_ext.pipeline.stages.parts import Parts, StageModule, explicit_parts
from hydra_ext.pipeline.stages.splitting import split_parts
from hydra_ext.pipeline.trace import Activity, PipelineTrace
from hydra_ext.pipeline.updates import Update
from hydra_ext.plan import PipelinePlan
from hydra_ext.policy import Checks, SimulatedDevice
from hydra_ext.schedule import Schedule
from hydra_ext.schedule.meaning import norm_comes_in_time
from hydra_ext.schedule.sharing import refuse_late_sums

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded

logger = logging.getLogger(__name__)

_LAST_MESSAGES = 20.0  # seconds that the links' threads have to end after a drain
_names = itertools.count()


class Pipeline:
    """Trains one model on several ranks, each of which holds some of its blocks.

    Initialise torch.distributed before, as in a program that ``torchrun`` starts; otherwise this process is the only
    rank. Every rank makes the same calls. The ranks of one replica pass the same microbatches.

    The first step rehearses ``fn`` to find the values that would cross between blocks, and cuts the model. Each rank
    keeps its own part; the other parameters lose their memory. Cutting calls ``fn`` once more, or twice where the model
    keeps tensors from one microbatch to the next, and four times more to choose cuts. All ranks make these calls. The
    generators that ``fn`` draws from are restored afterwards; a counter or an iterator of its own is not.

    Several stages may hold one tensor, such as a tied weight or a buffer outside of blocks. It begins with the values
    of the first of these stages. Every replica begins with the first replica's values.

    Args:
        model: The model that the ``fn`` of :meth:`step` calls: any module, whole or from
            :func:`hydra_ext.materialize`.
        optimizer: A function that makes an optimizer for the list of a stage's parameters.
        schedule: ``"2bw"`` (PipeDream-2BW: no bubble; each update uses gradients of the weights before the newest,
            W(t+1) = W(t) - lr * grad f(W(t-1))), ``"1f1b"``, ``"gpipe"`` or ``"interleaved"`` (the numbers of plain
            training, with a bubble), ``"pipedream"``, or a :class:`hydra_ext.schedule.Schedule`.
        microbatches: How many microbatches a step has in each replica; by default 8.
        stages: The number of stages; by default one for each rank of a line. Or, in place of ``model``, the stages as
            modules, or as functions that build them on their own rank only. The first stage gets the microbatch, each
            other one the result of the stage before.
        cuts: The blocks of ``model`` at which the stages after the first begin. Each is named by the block, by a module
            around it, or by the number of its event. By default the pipeline chooses them.
        replicas: The number of lines of ranks; by default 1. Each line trains a copy of the model on data of its own;
            gradients are averaged.
        budget: Device bytes of this rank for weights, gradients and activations together. With a budget all versions
            of the weights stay on the host and move to the device block by block, as with :func:`hydra_ext.offload`.
            Without one they are on the device.
        device: Where this rank computes. By default its GPU if it has one; else the CPU, or a simulated device if
            there is a budget.
        recompute: Keep only the values that arrive at a stage, and a copy of the microbatch, and run the stage's
            forward again before its backward.
        seed: The seed of all random numbers; the first rank's counts. By default its ``torch.initial_seed()``.
        patience: Seconds without a sign of life after which a rank counts as failed.
        checks: Switches for tests. They need a budget.
        plan: ``"auto"`` chooses what is not given of ``microbatches``, ``stages``, ``cuts``, ``replicas`` and
            ``recompute``, from the batch of the first call and times that the first rank measures. Every call then gets
            the whole batch on all ranks, and each line takes its share. From then on ``pipe.plan`` says what was
            chosen, and a rank has its place, and ``pipe.schedule``.

    Raises:
        InvalidArgument: An argument has another type or value than given here, the ranks do not divide into lines, or
            the schedule is for other stages or ranks.
        InvalidSchedule: There is no such schedule for these stages, ranks and microbatches, or a user's own schedule
            does not pass :meth:`~hydra_ext.schedule.Schedule.verify`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: MakeOptimizer,
        *,
        schedule: str | Schedule = "2bw",
        microbatches: int | None = None,
        stages: Sequence[StageModule] | int | None = None,
        cuts: Sequence[str | int] | None = None,
        replicas: int | None = None,
        budget: int | str | None = None,
        device: torch.device | str | SimulatedDevice | None = None,
        recompute: bool | None = None,
        seed: int | None = None,
        patience: float = 20.0,
        checks: Checks | None = None,
        plan: Literal["auto"] | None = None,
    ) -> None:
        modules = stage_modules(model, optimizer, stages, cuts)
        self._model = model
        self._make_optimizer = optimizer
        self._given = Given(
            schedule=schedule,
            microbatches=microbatches,
            stages=stages if isinstance(stages, int) else None,
            cuts=cuts,
            replicas=replicas,
            recompute=recompute,
        )
        check_plan(plan, self._given, len(modules))
        self.plan: PipelinePlan | None = None
        self._layout: Layout | None = None
        here = Topology.here(1)
        if plan is None:
            self._adopt(given_layout(self._given, len(modules)))
        self._tier = tier_options(budget, device, checks)
        self._device = choose_device(device) if self._tier is None else self._tier.place.device
        self._engine: Engine | None = None
        self._announcements: Announcements | None = None
        self._closed = False
        name = f"pipeline {next(_names)}"
        self._watch = Watch(here.rank, here.world, name, patience=patience, describe=self._describe)
        self._checkpoint = PipelineCheckpoint(Together(self._watch))
        with self._guarded():
            self._seed = common_seed(seed, self._watch)
            if modules:
                home = self._device if self._tier is None else torch.device("cpu")
                parts = explicit_parts(modules, self.schedule.stages_of(self.place), home)
                refuse_late_sums((("a weight", stages) for stages in parts.shared), self.schedule)
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
        """Makes one training step.

        Args:
            microbatches: A list of microbatches, or a tensor or a mapping of tensors that is cut into as many as the
                pipeline was made for. Do not write to them before their backwards have run: with ``"2bw"`` before the
                next step has returned.
            fn: Called as ``fn(microbatch)`` for a model, as ``fn(value, microbatch)`` with the last stage's value for
                stages given as modules. Returns the loss, ``(loss, metrics)`` or a mapping with ``"loss"``.
            max_norm: The norm to which the gradients of all stages together are clipped. If their norm is not finite,
                no rank updates its weights.
            seeds: Seeds of the microbatches' random numbers, one for each; by default made from the pipeline's own.

        Raises:
            InvalidArgument: The microbatches cannot be cut, the seeds are not as many, or ``max_norm`` does not fit the
                schedule.
            RankFailed: Another rank has failed.
            StateError: The pipeline has ended, or weights were written to.
        """
        self._check_open()
        works = self._works(microbatches, fn)
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
        """Computes losses with the newest weights, without gradients; drains first. All ranks have to call it.

        Later training steps give the same bits as without the evaluation. The modules keep their modes: call
        ``model.eval()`` before, and ``model.train()`` after, on every rank.

        Args:
            microbatches: As for :meth:`step`.
            fn: As for :meth:`step`.
        """
        self._check_open()
        works = self._works(microbatches, fn)
        with self._guarded():
            engine, announcements = self._begun(works[0], fn)
            batch = engine.evaluate(works, fn)
            output = PipelineOutput(batch.number, norm=None, skipped=False)
            announcements.publish(output, batch if engine.computes_losses else None)
            return output

    def prepare(self, microbatch: Any, fn: Callable[..., Any]) -> None:
        """Cuts the model and makes the optimizers, as the first step would otherwise do. All ranks have to call it.

        Args:
            microbatch: A microbatch of the kind that the steps have; with ``plan="auto"`` a whole batch.
            fn: As for :meth:`step`.

        Raises:
            SplitError: The model cannot be cut.
        """
        self._check_open()
        if self._layout is None or self._layout.shares:
            microbatch = self._works(microbatch, fn)[0]
        with self._guarded():
            self._begun(microbatch, fn)

    def drain(self) -> None:
        """Finishes all microbatches and updates: afterwards the weights are the newest, W(t) after t steps.

        All ranks have to call it. Later steps give the same bits as without the drain.
        """
        self._check_open()
        with self._guarded():
            if self._engine is not None:
                self._engine.drain()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the newest weights and the buffers of this rank's stages; drains first. All ranks have to call it.

        The keys are the model's own names, behind the stage's number where stages were given as modules. The tensors
        are no copies: they share the weights' memory.

        Raises:
            StateError: The model is not cut yet.
        """
        self.drain()
        if self._engine is None:
            raise StateError("this rank holds nothing before the first step, or prepare(): the model is still whole")
        return self._engine.state_dict()

    def refresh(self) -> None:
        """Takes over the model's weights after a program has written to them: all versions become these weights.

        All ranks have to call it, after :meth:`drain`.

        Raises:
            StateError: Microbatches or updates are under way.
        """
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
        loader: Stateful | None = None,
        keep: int = 2,
    ) -> Path:
        """Saves all that the next step depends on, as ``folder/step-00001234``; drains first.

        The checkpoint is on the disk when the call returns. All ranks have to call it, with the same folder.

        A checkpoint holds parameters and buffers by the model's own names, as :meth:`state_dict` has them. It holds the
        optimizers' state by parameter, as one optimizer for the whole model would have it. It also holds the older
        versions of the weights that later steps use, random states, and the number of steps. A pipeline of any number
        of stages and replicas can load it, and so can :func:`hydra_ext.load_model` and Hugging Face's
        ``from_pretrained``. ``run.load`` of an offloaded run with the same optimizer can, where no later step uses
        older weights.

        Every rank of the first replica writes its tensors, one after another, into files of its own. All ranks have to
        see the folder. A crash of a process or a machine at any moment leaves either this checkpoint or the one before
        it whole. No whole checkpoint is ever overwritten. If a rank fails, all of them raise, earlier checkpoints stay,
        and the pipeline can go on.

        Args:
            folder: The folder of checkpoints. It is made if it does not exist.
            extra: More to keep: None, numbers, texts, and lists and dicts of them. The first rank's counts.
            schedule: The learning-rate scheduler of this rank's optimizer; a list for several. All schedulers have to
                be in one state.
            loader: What gives this rank's data, such as a :class:`hydra_ext.data.Loader`, or another object with
                ``state_dict()`` and ``load_state_dict()``. Each rank's own is saved.
            keep: How many checkpoints stay in the folder, this one included. Older ones are removed afterwards.

        Returns:
            The checkpoint's own folder.

        Raises:
            StateError: A step is under way, the model is not cut yet, or a parameter has a gradient that no step has
                used.
            InvalidArgument: ``extra`` or ``keep`` is not as given here.
            UnsupportedState: No checkpoint can hold a part of the state.
            SaveFailed: The checkpoint could not be written.
            RankFailed: Another rank has failed.
        """
        engine = self._at_rest("pipe.save")
        return self._checkpoint.save(engine, Path(folder), schedule, loader, extra=extra, keep=keep)

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        strict: bool = True,
        schedule: Stateful | Sequence[Stateful] | None = None,
        loader: Stateful | None = None,
    ) -> Loaded | None:
        """Loads the newest checkpoint of a folder: the next step gives the bits that the saved run would have given.

        All ranks have to call it, and see the same folder. Cut a plain model before, with :meth:`prepare`.

        Every rank reads the tensors that it holds, from a checkpoint of any number of stages and replicas, or of
        ``run.save``. Before anything changes, all ranks agree on one checkpoint, and each checks every byte that it
        will read. The pipeline takes the ``seed`` of a pipeline's checkpoint. Gradients are dropped.

        Args:
            folder: A folder of checkpoints, into which another process may be saving, or one checkpoint.
            strict: Whether to raise if the newest checkpoint is damaged. Otherwise the newest whole one is loaded, and
                a warning is logged.
            schedule: The schedulers, as for :meth:`save`.
            loader: As for :meth:`save`; its next iteration goes on where this rank's had been. If the replicas are as
                many and the stages are not, it goes on where its replica's ranks had been, if they agree.

        Returns:
            What was loaded. None if there is no checkpoint, or no such folder: the training begins.

        Raises:
            CheckpointError: The checkpoint is damaged, or was removed before it could be read. All ranks raise it, with
                the first damaged file and tensor.
            CheckpointMismatch: The checkpoint is of another model or optimizer, or of a schedule whose steps use older
                or newer weights than this one's, or has no state for a rank's ``loader``. The error lists all
                differences.
            StateError: A step is under way, or the model is not cut yet.
            UnsupportedState: No checkpoint can hold the state of this model or optimizer.
            RankFailed: Another rank has failed.
        """
        return self._checkpoint.load(self._at_rest("pipe.load"), Path(folder), schedule, loader, strict=strict)

    def report(self) -> PipelineReport:
        """Reports what this rank holds and has done so far. A rank may call it at any time, without the others."""
        return make_report(self._planned.schedule, self._planned.topology, self._engine)

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Returns a context that records this rank's actions and writes them to ``path`` on exit, after an error too.

        The file opens in https://ui.perfetto.dev. Each of several ranks writes a file of its own: ``step.json`` becomes
        ``step.rank0.json``, and so on. Their clock is the machines' time of day, so that they can be joined:
        ``jq -s '{traceEvents: map(.traceEvents) | add}' step.rank*.json > step.json``. Actions that have not ended when
        the context is left are not in the file: call :meth:`drain` before, to have all of a step with ``"2bw"``.

        Raises:
            TraceFileError: The file cannot be written.
        """
        return PipelineTrace(path, self._planned.schedule, self._planned.topology, self._activity)

    def close(self) -> None:
        """Drains, and ends the pipeline. All ranks have to call it; it waits for the ranks that still live.

        Raises:
            RankFailed: Another rank has failed, or has ended without this call. If an earlier call has raised the
                failure here, this one only releases what is left.
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
        return self._watch.rank

    @property
    def place(self) -> int:
        return self._planned.topology.place

    @property
    def replica(self) -> int:
        return self._planned.topology.replica

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank's stages; a stage without trained parameters has none.

        Raises:
            StateError: The optimizers are made by the first step, or by :meth:`prepare`.
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
        """Tells the other ranks of an error in the body, unless it is another rank's failure."""
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

    @property
    def _planned(self) -> Layout:
        if self._layout is None:
            raise StateError("this pipeline is not planned yet: call pipe.prepare(batch, fn), or make a step, before")
        return self._layout

    def _adopt(self, layout: Layout) -> None:
        self._layout, self.schedule = layout, layout.schedule

    def _works(self, batch: Any, fn: Callable[..., Any]) -> list[Any]:
        """This line's microbatches of a batch, of which the first one makes the plan."""
        if self._layout is None and self._model is not None:
            with self._guarded():
                layout, self.plan = planned_layout(
                    self._given,
                    self._model,
                    batch,
                    fn,
                    world=Topology.here(1).world,
                    watch=self._watch,
                    device=self._device,
                    budget=None if self._tier is None else self._tier.budget,
                    seed=self._seed,
                )
                self._adopt(layout)
        return self._planned.works(batch)

    def _begun(self, microbatch: Any, fn: Callable[..., Any]) -> tuple[Engine, Announcements]:
        if self._engine is None or self._announcements is None:
            if self._model is None:
                raise StateError("this pipeline has not begun")
            parts = split_parts(
                self._model,
                fn,
                microbatch,
                schedule=self.schedule,
                topology=self._planned.topology,
                watch=self._watch,
                device=self._device,
                home=self._device if self._tier is None else torch.device("cpu"),
                cuts=self._planned.cuts,
                seed=self._seed,
            )
            return self._begin(parts)
        return self._engine, self._announcements

    def _begin(self, parts: Parts) -> tuple[Engine, Announcements]:
        assembly = assemble(
            parts,
            self._make_optimizer,
            self.schedule,
            self._planned.topology,
            self._watch,
            self._device,
            recompute=self._planned.recompute,
            budget=self._tier,
        )
        engine = Engine(assembly, self.schedule, self._planned.topology, self._watch, self._device, seed=self._seed)
        announcements = Announcements(assembly.losses, assembly.loss_listeners, engine.executor.tally)
        self._engine, self._announcements = engine, announcements
        return engine, announcements

    def _finish(self) -> None:
        """Returns when no rank needs another one any more."""
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
        """Ends a pipeline that was not closed, when Python exits."""
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
