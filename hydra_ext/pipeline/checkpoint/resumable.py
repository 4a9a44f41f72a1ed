"""Saving a pipeline, and going on from what was saved: the part of :class:`hydra_ext.Pipeline` that users see.

The modules behind it are imported at the first use: other programs do not wait for them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import StateError
from hydra_ext.pipeline.engine import Engine
from hydra_ext.pipeline.ranks.together import Together

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded


class Resumable(ABC):
    """What can be saved and loaded. The rest of it is :class:`hydra_ext.Pipeline`."""

    _engine: Engine | None
    _together: Together
    _files = Files()

    @abstractmethod
    def drain(self) -> None:
        """Finishes what is under way."""

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
        from hydra_ext.pipeline.checkpoint.saving import Save, Wanted

        engine = self._at_rest("pipe.save")
        wanted = Wanted(extra, _several(schedule), keep)
        return Save(engine, self._together, Path(folder), wanted, self._files).run()

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
        from hydra_ext.pipeline.checkpoint import resuming

        engine = self._at_rest("pipe.load")
        schedules = _several(schedule)
        return resuming.load(
            engine, self._together, Path(folder), strict=strict, schedules=schedules, files=self._files
        )

    def _at_rest(self, asked: str) -> Engine:
        if self._engine is None:
            raise StateError(f"{asked}: the model is not cut yet: call pipe.prepare(microbatch, fn) before")
        self._engine.executor.check_between_steps(asked)
        self.drain()
        return self._engine


def _several(schedule: Stateful | Sequence[Stateful] | None) -> Sequence[Stateful]:
    if schedule is None:
        return ()
    return schedule if isinstance(schedule, Sequence) else (schedule,)
