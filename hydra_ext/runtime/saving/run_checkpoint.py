"""Saves a run to checkpoints, and resumes it from them.

The first call imports the modules that do the work, which keeps ``import hydra_ext`` fast.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.runtime.placement.spilling import Spilling
from hydra_ext.runtime.replicas import Replicas
from hydra_ext.runtime.reporting.figures import StepMeter
from hydra_ext.tracing import nothing_traced

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded
    from hydra_ext.checkpoint.saving import Contents
    from hydra_ext.runtime.saving.snapshot import Passing, Training
    from hydra_ext.runtime.saving.termination import Noted, Termination

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Helpers = dict[str, "Stateful | None"]


class CheckpointOwner(Protocol):
    """The run that is saved and loaded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    layout: Layout
    core: _C.PagedModel
    replicas: Replicas | None
    device: torch.device
    meter: StepMeter
    closed: bool

    def sync(self) -> None: ...


class RunCheckpoint:
    """The part of a run that saves and loads. :class:`hydra_ext.Run` documents the calls.

    Args:
        run: Run to save and load.
        saving: Policy for saved activations, whose adaptive bounds are in no checkpoint.
        spilling: Plan for tensors whose home is the disk; None if there are none.

    Attributes:
        files: Interface for all file operations.
        gradients_used: Whether a step of the optimizer has used the gradients since the last backward.
        reads_the_disk: Whether a save or load is under way, which reads tensors at home on the disk block by block.
        overwrites: Whether a load is under way, for which rows of tables need not be up to date, or be there at all.
    """

    def __init__(self, run: CheckpointOwner, saving: Saving | None, spilling: Spilling | None) -> None:
        self.files = Files()
        self.gradients_used = True
        self.reads_the_disk = self.overwrites = False
        self._owner = weakref.ref(run)  # a reference would be a cycle: the run refers to this object
        self._saving = saving
        self._spilling = spilling
        self._termination: Termination | None = None

    @property
    def _run(self) -> CheckpointOwner:
        run = self._owner()
        if run is None:
            raise StateError("the run that this checkpoint object belongs to has been deleted")
        return run

    # ---- loading ----------------------------------------------------------------------------------------------------

    def load(self, path: Path, helpers: Helpers, *, strict: bool) -> Loaded | None:
        training = self._training("run.load", helpers)
        with self._reading_the_disk():
            self.overwrites = True
            return self._load(path, training, strict=strict)

    def _load(self, path: Path, training: Training, *, strict: bool) -> Loaded | None:
        from hydra_ext.checkpoint import choosing, loading
        from hydra_ext.checkpoint.format import manifest
        from hydra_ext.runtime.saving import snapshot

        self._together(lambda: self._expect_rest("run.load"))
        _C.suspend_charging()
        with choosing.newest(
            path,
            self.files,
            lambda reader: reader.hold(manifest.SECTIONS),
            strict=strict,
            everywhere=self._everywhere,
            rank=training.rank,
        ) as reader:
            if reader is None:
                logger.info(
                    "there is no checkpoint in %s: the training begins at step %d", path, self._run.meter.updates
                )
                return None
            self._together(self._together(lambda: snapshot.Return(training, reader)).put)
            self.gradients_used = True
            self._run.meter.updates = reader.manifest.step
            if self._saving is not None and self._saving.learns:
                logger.warning("the adaptive bounds of hydra_ext.Compress start over, as no checkpoint contains them")
            return loading.loaded(reader)

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        helpers: Helpers,
        *,
        extra: Any,
        keep: int,
        noted: Passing | None = None,
    ) -> Path:
        """Saves a checkpoint.

        Args:
            path: Folder of the checkpoints.
            helpers: Schedule, scaler and loader of the caller.
            extra: Additional data of the caller.
            keep: Number of checkpoints to retain.
            noted: State to save in place of the present one.
        """
        from hydra_ext.checkpoint.saving import save
        from hydra_ext.runtime.saving import snapshot

        training = self._training("run.save", helpers)

        def taken() -> Contents:
            if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
                raise InvalidArgument(f"run.save: keep={keep!r}: give a number of checkpoints, 1 or more")
            self._expect_rest("run.save")
            _C.suspend_charging()
            name = snapshot.pending_gradient(training, used=self.gradients_used)
            if name is not None:
                raise StateError(
                    f"run.save: '{name}' has a gradient that no step has used, and no checkpoint would hold it: save "
                    "after optimizer.step(), or after model.zero_grad()"
                )
            return snapshot.take(
                training, noted or snapshot.passing(training), step=self._run.meter.updates, extra=extra
            )

        with self._reading_the_disk():
            contents = snapshot.with_ranks(self._together(taken), training)
            return Path(self._from_first(lambda: str(save(path, contents, keep=keep, files=self.files))))

    def end_on_sigterm(self, path: Path, helpers: Helpers, *, extra: Callable[[], Any] | None, keep: int) -> None:
        from hydra_ext.runtime.saving import snapshot
        from hydra_ext.runtime.saving.termination import Noted, Termination

        training = self._training("run.save_on_sigterm", helpers)
        if self._termination is not None:
            raise StateError("run.save_on_sigterm was called before: one folder is enough")

        def note() -> Noted:
            return Noted(snapshot.passing(training), None if extra is None else extra())

        def saved(noted: Noted | None) -> None:
            noted = noted or note()
            self.save(path, helpers, extra=noted.extra, keep=keep, noted=noted.passing)

        snapshot.randomness(training)
        self._termination = Termination(note, saved, self._run.replicas)

    @nothing_traced
    def step_begins(self) -> None:
        """Called by ``run.step`` and every forward with gradients. No-op inside a step, a forward or a backward."""
        run = self._run
        if self._termination is not None and not (run.meter.inside or run.core.gate.open):
            self._termination.step_begins()

    def step_ended(self) -> None:
        if self._termination is not None:
            self._termination.step_ended()

    def end_steps(self) -> None:
        """Declares that no step follows: a SIGTERM that waits for the next step is handled now."""
        if self._termination is not None:
            self._termination.step_begins(last=True)

    def close(self) -> None:
        """Restores the previous handler of SIGTERM."""
        if self._termination is not None:
            self._termination.close()

    # ---- both -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading_the_disk(self) -> Iterator[None]:
        self.reads_the_disk = True
        try:
            yield
        finally:
            self.reads_the_disk = self.overwrites = False

    def _training(self, asked: str, helpers: Helpers) -> Training:
        from hydra_ext.runtime.saving.snapshot import Training

        run = self._run
        if run.closed:  # communication with the other ranks has ended
            raise StateError(f"{asked}: the offload context of this model has ended")
        return Training(
            run.model, run.optimizer, run.layout, run.device, run.replicas, helpers, run.core, self._spilling
        )

    def _expect_rest(self, asked: str) -> None:
        if self._run.core.gate.open or self._run.meter.inside:
            raise StateError(
                f"{asked} was called while a step, a forward or a backward of the model is under way, here or in "
                "another thread: call it between steps"
            )
        self._run.sync()

    def _together(self, work: Callable[[], Result]) -> Result:
        return work() if self._run.replicas is None else self._run.replicas.together(work)

    def _everywhere(self, work: Callable[[], str]) -> list[str]:
        """Runs ``work`` on every rank. Returns the results of all ranks, on each of them."""
        if self._run.replicas is None:
            return [work()]
        found = self._run.replicas.together(work)
        return [os.fsdecode(each) for each in self._run.replicas.gather(os.fsencode(found))]

    def _from_first(self, work: Callable[[], str]) -> str:
        """Runs ``work`` on rank 0 only. Returns its result on every rank."""
        alone = self._run.replicas is None or self._run.replicas.rank == 0
        return self._everywhere(work if alone else str)[0]
