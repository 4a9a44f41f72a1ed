"""Finds a checkpoint, checks every byte to be loaded, and only then writes to a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hydra_ext.checkpoint import model_state
from hydra_ext.checkpoint.choosing import newest
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.checkpoint.model_state import Named
from hydra_ext.errors import CheckpointError, CheckpointMismatch, UnsupportedState

logger = logging.getLogger(__name__)

_SHOWN = 20  # differences in a message; the error's attribute has all of them


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        step: Number of optimizer steps when it was saved.
        extra: The value that the caller had saved with ``extra=``.
        path: The checkpoint's own folder.
    """

    step: int
    extra: Any
    path: Path


def load_model(folder: str | os.PathLike[str], model: nn.Module) -> Loaded:
    """Loads a checkpoint's parameters and buffers into a model. Optimizers and random states stay as they are.

    Args:
        folder: Folder of checkpoints, whose newest is taken, or a single checkpoint. Another process may be saving
            there.
        model: Model with exactly the tensors that were saved, under the same names, on any device.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it was removed meanwhile. Nothing was changed. If a
            file changes between its check and its read, the model is partly loaded, and the message says so.
        CheckpointMismatch: The checkpoint is of another model.
        UnsupportedState: The model has tensors that no checkpoint can hold, or that have no memory.
    """
    path = Path(folder)
    with newest(path, Files(), lambda reader: reader.hold(("model",))) as reader:
        if reader is None:
            raise CheckpointError(f"there is no checkpoint in {path}", file=path)
        tensors = model_state.named_tensors(model)
        expect_none(reader, model_state.differences(tensors, reader.manifest))
        _refuse_without_memory(tensors)
        reader.check(("model",))
        with half_done():
            put_model(reader, tensors)
        return loaded(reader)


def _refuse_without_memory(tensors: Sequence[Named]) -> None:
    name = next((named.name for named in tensors if named.tensor.is_meta), None)
    if name is not None:
        raise UnsupportedState(
            f"{name!r} is on meta, so there is no memory to load into: build the model with "
            "hydra_ext.materialize(build, weights=...) of the checkpoint's own folder, or call run.load() inside "
            "hydra_ext.offload"
        )


# ---- steps of a load ------------------------------------------------------------------------------------------------


def expect_none(reader: Reader, differences: Sequence[str]) -> None:
    """
    Raises:
        CheckpointMismatch: There are differences.
    """
    if not differences:
        return
    shown = [*differences[:_SHOWN], *([f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else [])]
    raise CheckpointMismatch(
        f"{reader.path} does not fit what it is loaded into: " + "; ".join(shown) + ". Build what was saved; nothing "
        "was changed",
        file=reader.path,
        differences=tuple(differences),
    )


def put_model(reader: Reader, tensors: Sequence[Named], *, put: Callable[[Tensor], None] = lambda _: None) -> None:
    """Loads a model's tensors one after another, in the order of their bytes in the files.

    Args:
        put: Called with each tensor before it is written to.
    """
    records = reader.manifest.tensors.get("model", {})
    for named in sorted(tensors, key=lambda named: (records[named.name].file, records[named.name].span.begin)):
        put(named.tensor)
        model_state.put(named.tensor, reader.read("model", named.name))


@contextmanager
def half_done() -> Iterator[None]:
    """Adds to errors from inside that the model is partly loaded."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The file was whole a moment ago, so the loaded state is partly new and partly old: load again "
            "before you go on",
            file=error.file,
            tensor=error.tensor,
        ) from error


def loaded(reader: Reader) -> Loaded:
    return Loaded(reader.manifest.step, reader.manifest.content.get("extra"), reader.path)
