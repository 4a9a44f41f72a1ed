"""Finds a checkpoint, makes sure of every byte of it, and only then gives it to a model."""

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

_SHOWN = 20  # differences in a message; the error has all of them


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: optimizer steps made when it was saved.
        extra: what the caller had added to it.
        path: the checkpoint's own folder.
    """

    step: int
    extra: Any
    path: Path


def load_model(folder: str | os.PathLike[str], model: nn.Module) -> Loaded:
    """Gives a model the parameters and buffers of a checkpoint, and nothing else: neither optimizer nor randomness.

    Args:
        folder: of checkpoints, of which the newest is taken, or one checkpoint. Another process may be saving there.
        model: has the tensors that were saved, under their names, and no others; on any device.

    Raises:
        CheckpointError: there is none, it is damaged, or was removed meanwhile; nothing was changed. Should a file
            change between its being looked at and its being read, the model is partly loaded, and the message says so.
        CheckpointMismatch: it is of another model.
        UnsupportedState: the model has tensors that no checkpoint can hold, or that have no memory.
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
            f"{name!r} is on meta, where nothing can be loaded to: build the model with "
            "hydra_ext.materialize(build, weights=...) of the checkpoint's own folder, or call run.load() inside "
            "hydra_ext.offload"
        )


# ---- what to do with it ---------------------------------------------------------------------------------------------


def expect_none(reader: Reader, differences: Sequence[str]) -> None:
    """
    Raises:
        CheckpointMismatch: there are differences.
    """
    if not differences:
        return
    shown = [*differences[:_SHOWN], *([f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else [])]
    raise CheckpointMismatch(
        f"{reader.path} is of something else: " + "; ".join(shown) + ". Build what was saved; nothing was changed",
        file=reader.path,
        differences=tuple(differences),
    )


def put_model(reader: Reader, tensors: Sequence[Named], *, put: Callable[[Tensor], None] = lambda _: None) -> None:
    """One tensor after another, in the order of their bytes.

    Args:
        put: called with each before it is written to.
    """
    records = reader.manifest.tensors.get("model", {})
    for named in sorted(tensors, key=lambda named: (records[named.name].file, records[named.name].span.begin)):
        put(named.tensor)
        model_state.put(named.tensor, reader.read("model", named.name))


@contextmanager
def half_done() -> Iterator[None]:
    """What fails inside has changed something."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. It was whole a moment ago: what is loaded now is partly new and partly old. Load again before "
            "you go on",
            file=error.file,
            tensor=error.tensor,
        ) from error


def loaded(reader: Reader) -> Loaded:
    return Loaded(reader.manifest.step, reader.manifest.content.get("extra"), reader.path)
