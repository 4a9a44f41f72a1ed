"""What the process that trains, the server and the workers tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hydra_ext.data.places import Place

# ---- to the server --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare:
    """What a new process needs, as ``multiprocessing.spawn`` has it.

    Attributes:
        process: Folders and the like.
        main: Where the program's main module is.
        dtype: torch's default dtype in the training.
    """

    process: Mapping[str, Any]
    main: Mapping[str, Any]
    dtype: torch.dtype


@dataclass(frozen=True)
class Load:
    """A stage's function, pickled, and whether it needs the program's main module."""

    stage: int
    function: bytes
    needs_main: bool


@dataclass(frozen=True)
class Start:
    """A worker is to start. The descriptor of its connection follows."""

    stage: int


# ---- between the process that trains and a worker -------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A worker is there.

    Attributes:
        process: Its number.
        broken: Why the function cannot be loaded; empty if it could.
    """

    process: int
    broken: str


@dataclass(frozen=True)
class Take:
    """An item.

    Attributes:
        place: Of the sample.
        item: Its bytes.
        buffers: Where its memory lies in the region: begin and size.
    """

    place: Place
    item: bytes
    buffers: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Ask:
    """A worker asks for room for buffers of these sizes, in bytes."""

    sizes: Sequence[int]


@dataclass(frozen=True)
class Room:
    """The answer.

    Attributes:
        begin: Where the buffers may lie, one after the other; None if there is no room, and they travel by themselves.
        is_refused: Whether the result is wanted no more.
    """

    begin: int | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class Done:
    """What the function has made, without the buffers."""

    data: bytes


@dataclass(frozen=True)
class Failed:
    """The function has raised.

    Attributes:
        message: For people.
        trace: The traceback.
        error: The error, pickled; empty if it cannot be.
    """

    message: str
    trace: str
    error: bytes
