"""Saving a run, and going on from what was saved: the part of :class:`hydra_ext.Run` that users see.

What does it is imported by the first call, which keeps ``import hydra_ext`` fast.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.runtime.replicas import Replicas
from hydra_ext.runtime.reporting.figures import StepMeter
from hydra_ext.tracing import nothing_traced

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded
    from hydra_ext.checkpoint.saving import Contents
    from hydra_ext.runtime.placement.spilling import Spilling
    from hydra_ext.runtime.saving.snapshot import Training
    from hydra_ext.runtime.saving.termination import Noted, Termination

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Resumable(ABC):
    """What can be saved and loaded. The rest of it is :class:`hydra_ext.Run`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    layout: Layout
    core: _C.PagedModel
    replicas: Replicas | None
    device: torch.device
    meter: StepMeter
    _saving: Saving | None
    _closed: bool
    _gradients_used = True  # by a step of the optimizer, since the last backward
    _termination: Termination | None = None
    _spilling: Spilling | None
    _reads_the_disk = False  # saving or loading: what is at home on the disk is taken from there, block by block
    _files = Files()

    @abstractmethod
    def sync(self) -> None:
        """Waits for what is under way."""

    # ---- for users --------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps made, those before the checkpoint that was loaded included."""
        return self.meter.updates

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        extra: Any = None,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
        keep: int = 2,
    ) -> Path:
        """Saves all that the next step depends on, as ``folder/step-00001234``; safe when it returns.

        Parameters, buffers, the optimizer's state, random states and ``steps``. A crash at any moment, of the process
        or of the machine, leaves the checkpoint before or this one whole. Nothing that is whole is ever written over:
        where ``step-00001234`` is taken, the new one is ``step-00001234-2``; the newest is the one saved last. With
        several ranks all of them call it, and rank 0 writes.

        Gradients are not saved: those that a step has used are gone after a load, as after ``zero_grad()``.

        Args:
            folder: of checkpoints; made if it is not there.
            extra: what else is to be kept: None, numbers, texts, and lists and dicts of them. Rank 0's counts.
            schedule, scaler: a schedule of learning rates and a ``GradScaler``, whose state is saved, too.
            keep: how many checkpoints stay in the folder, this one included; older ones are removed afterwards.

        Returns:
            The checkpoint's own folder. Hugging Face's ``from_pretrained`` reads it.

        Raises:
            StateError: the model's forward or backward is under way, or gradients wait for a step.
            InvalidArgument: ``extra`` or ``keep`` is none.
            UnsupportedState: something of the state can be put into no checkpoint.
            SaveFailed: it could not be written.
            RankFailed: another rank has failed.
        """
        return self._save(Path(folder), None, extra=extra, schedule=schedule, scaler=scaler, keep=keep)

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        strict: bool = True,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
    ) -> Loaded | None:
        """Goes on from the newest checkpoint in a folder: the next step has the bits that it would have had.

        Every byte is checked before anything is changed. Gradients are dropped. With several ranks all of them call
        it, and see the same folder.

        Args:
            folder: of checkpoints, to which another process may be saving, or one checkpoint.
            strict: if the newest one is damaged, raise; else take the newest that is whole, and log a warning.
            schedule, scaler: what :meth:`save` was given.

        Returns:
            What was loaded; None if there is no checkpoint, or no such folder: the training begins.

        Raises:
            CheckpointError: it is damaged, or was removed before it could be read.
            CheckpointMismatch: it is of another model or optimizer; the error lists all differences.
            StateError: the model's forward or backward is under way.
            UnsupportedState: no checkpoint can hold the state of this model or optimizer.
            RankFailed: another rank has failed.
        """
        path = Path(folder)
        training = self._training("run.load", schedule, scaler)
        with self._reading_the_disk():
            return self._load(path, training, strict=strict)

    def _load(self, path: Path, training: Training, *, strict: bool) -> Loaded | None:
        from hydra_ext.checkpoint import choosing, loading
        from hydra_ext.checkpoint.format import manifest
        from hydra_ext.runtime.saving import snapshot

        self._together(lambda: self._expect_rest("run.load"))
        _C.suspend_charging()
        with choosing.newest(
            path,
            self._files,
            lambda reader: reader.hold(manifest.SECTIONS),
            strict=strict,
            everywhere=self._everywhere,
            rank=0 if self.replicas is None else self.replicas.rank,
        ) as reader:
            if reader is None:
                logger.info("there is no checkpoint in %s: the training begins at step %d", path, self.steps)
                return None
            self._together(self._together(lambda: snapshot.Return(training, reader)).put)
            self._gradients_used = True
            self.meter.updates = reader.manifest.step
            if self._saving is not None and self._saving.learns:
                logger.warning("the adaptive bounds of hydra_ext.Compress begin anew, and are in no checkpoint")
            return loading.loaded(reader)

    def save_on_sigterm(
        self,
        folder: str | os.PathLike[str],
        *,
        extra: Callable[[], Any] | None = None,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
        keep: int = 2,
    ) -> None:
        """From now on SIGTERM ends the process between two steps, behind a :meth:`save`.

        The step under way is finished. The save comes as the next forward with gradients or ``run.step`` begins, or the
        context ends, so that whatever follows ``optimizer.step()`` in the loop, evaluation included, belongs to it. Of
        random states those are saved that ``optimizer.step()`` left: what is drawn behind it is drawn again, as the
        next batch is. Then the handler that was there before is called; if there was none, ``SystemExit(143)`` is
        raised. A second SIGTERM goes to that handler at once. A signal to one rank is one to all.

        Args:
            folder, schedule, scaler, keep: as for :meth:`save`.
            extra: called as the last step ends; what it returns is saved.

        Raises:
            StateError: this is not the main thread, it was called before, or the context has ended.
            UnsupportedState: random states cannot be saved.
        """
        from hydra_ext.runtime.saving import snapshot
        from hydra_ext.runtime.saving.termination import Noted, Termination

        path = Path(folder).absolute()  # wherever the process is by then
        training = self._training("run.save_on_sigterm", schedule, scaler)
        if self._termination is not None:
            raise StateError("run.save_on_sigterm was called before: one folder is enough")

        def note() -> Noted:
            return Noted(snapshot.randomness(training), None if extra is None else extra())

        def saved(noted: Noted | None) -> None:
            noted = noted or note()
            self._save(path, noted.randomness, extra=noted.extra, schedule=schedule, scaler=scaler, keep=keep)

        snapshot.randomness(training)
        self._termination = Termination(note, saved, self.replicas)

    @nothing_traced
    def _step_begins(self) -> None:
        """Perhaps: it is called by every forward that might be its first, which one without gradients is not."""
        if self._termination is not None and not (self.meter.inside or self.core.gate.open):
            self._termination.step_begins()

    def end_steps(self) -> None:
        """None follows: a signal that was to be served in the next one is served now."""
        if self._termination is not None:
            self._termination.step_begins(last=True)

    # ---- how --------------------------------------------------------------------------------------------------------

    def _save(
        self,
        path: Path,
        random: dict[str, Any] | None,
        *,
        extra: Any,
        schedule: Stateful | None,
        scaler: Stateful | None,
        keep: int,
    ) -> Path:
        """``random``: the states to be saved; None for those of now."""
        from hydra_ext.checkpoint.saving import save
        from hydra_ext.runtime.saving import snapshot

        training = self._training("run.save", schedule, scaler)

        def taken() -> Contents:
            if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
                raise InvalidArgument(f"run.save: keep={keep!r}: give a number of checkpoints, 1 or more")
            self._expect_rest("run.save")
            _C.suspend_charging()
            name = snapshot.pending_gradient(training, used=self._gradients_used)
            if name is not None:
                raise StateError(
                    f"run.save: '{name}' has a gradient that no step has used, and no checkpoint would hold it: save "
                    "after optimizer.step(), or after model.zero_grad()"
                )
            return snapshot.take(training, random or snapshot.randomness(training), step=self.steps, extra=extra)

        with self._reading_the_disk():
            contents = snapshot.with_ranks(self._together(taken), training)
            return Path(self._from_first(lambda: str(save(path, contents, keep=keep, files=self._files))))

    @contextmanager
    def _reading_the_disk(self) -> Iterator[None]:
        self._reads_the_disk = True
        try:
            yield
        finally:
            self._reads_the_disk = False

    def _training(self, asked: str, schedule: Stateful | None, scaler: Stateful | None) -> Training:
        from hydra_ext.runtime.saving.snapshot import Training

        if self._closed:  # the other ranks are not heard any more
            raise StateError(f"{asked}: the offload context of this model has ended")
        helpers = {"schedule": schedule, "scaler": scaler}
        return Training(
            self.model, self.optimizer, self.layout, self.device, self.replicas, helpers, self.core, self._spilling
        )

    def _expect_rest(self, asked: str) -> None:
        if self.core.gate.open or self.meter.inside:
            raise StateError(
                f"{asked} was called while a step, a forward or a backward of the model is under way, here or in "
                "another thread: call it between steps"
            )
        self.sync()

    def _together(self, work: Callable[[], Result]) -> Result:
        return work() if self.replicas is None else self.replicas.together(work)

    def _everywhere(self, work: Callable[[], str]) -> list[str]:
        """What it gives on each rank, on all of them."""
        if self.replicas is None:
            return [work()]
        found = self.replicas.together(work)
        return [os.fsdecode(each) for each in self.replicas.gather(os.fsencode(found))]

    def _from_first(self, work: Callable[[], str]) -> str:
        """What it gives on rank 0, where alone it is done, on every rank."""
        alone = self.replicas is None or self.replicas.rank == 0
        return self._everywhere(work if alone else str)[0]
