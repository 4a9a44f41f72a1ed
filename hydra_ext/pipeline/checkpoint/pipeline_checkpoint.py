"""Saves a pipeline, and loads what was saved.

The first call imports the modules for it, which keeps ``import hydra_ext`` fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_ext.checkpoint.format.files import Files
from hydra_ext.pipeline.engine import Engine
from hydra_ext.pipeline.ranks.together import Together

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded


class PipelineCheckpoint:
    """The part of a pipeline that saves and loads. :class:`hydra_ext.Pipeline` documents the calls.

    Attributes:
        together: Runs the work that all ranks do together.
        files: Makes all calls that touch files.
    """

    def __init__(self, together: Together) -> None:
        self.files = Files()
        self.together = together

    def save(
        self,
        engine: Engine,
        path: Path,
        schedule: Stateful | Sequence[Stateful] | None,
        loader: Stateful | None,
        *,
        extra: Any,
        keep: int,
    ) -> Path:
        from hydra_ext.pipeline.checkpoint.saving import Save, Wanted

        wanted = Wanted(extra, _several(schedule), loader, keep)
        return Save(engine, self.together, path, wanted, self.files).run()

    def load(
        self,
        engine: Engine,
        path: Path,
        schedule: Stateful | Sequence[Stateful] | None,
        loader: Stateful | None,
        *,
        strict: bool,
    ) -> Loaded | None:
        from hydra_ext.pipeline.checkpoint import resuming

        given = resuming.Helpers(_several(schedule), loader)
        return resuming.load(engine, self.together, path, given, strict=strict, files=self.files)


def _several(schedule: Stateful | Sequence[Stateful] | None) -> Sequence[Stateful]:
    if schedule is None:
        return ()
    return schedule if isinstance(schedule, Sequence) else (schedule,)
