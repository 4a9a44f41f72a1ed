"""The states of the loaders that feed a training. Each rank that reads data has one of its own.

They are JSON in the manifest. So are the tensors in them, which are small: states of generators.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hydra_ext.checkpoint import helper_state
from hydra_ext.checkpoint.format.header import CODES, DTYPES, is_count
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.checkpoint.format.tensors import bytes_of, empty
from hydra_ext.checkpoint.format.values import BadValue, Encoder
from hydra_ext.checkpoint.helper_state import Stateful
from hydra_ext.errors import UnsupportedState

logger = logging.getLogger(__name__)

_NAME = "loader"


def capture(loader: Stateful | None) -> dict[str, Any] | None:
    """A loader's state as JSON; None for no loader.

    Raises:
        UnsupportedState: The state cannot be restored from JSON, or is not a dict.
    """
    encoder = Encoder()
    captured = helper_state.capture(loader, _NAME, encoder)
    if captured is None:
        return None
    tensors = {
        entry.name: [CODES[entry.dtype], list(entry.shape), bytes_of(entry.fetch()).hex()] for entry in encoder.entries
    }
    if len(tensors) < len(encoder.entries):
        raise UnsupportedState("loader=: two tensors of its state have keys that are one text: let them differ")
    return {**captured, "tensors": tensors}


def joined(states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The states of all ranks, by rank; None if no rank has a loader. Equal states are there once."""
    found: list[dict[str, Any]] = []
    ranks: list[int | None] = []
    for state in states:
        if state is not None and state not in found:
            found.append(state)
        ranks.append(None if state is None else found.index(state))
    return {"states": found, "ranks": ranks} if found else None


class SavedLoader:
    """The saved state for a rank's loader, which is checked and not loaded yet.

    Each rank gets its own. Ranks of one replica pass the same microbatches. So where their number has changed, and the
    replicas' has not, a rank gets the one state that its replica's ranks had.

    Args:
        reader: A checkpoint whose lists of ranks and buffers are checked.
        rank, ranks, replicas: This rank, and all of them, now.

    Attributes:
        differences: Why the loader has no state there, a line each.

    Raises:
        BadValue: The states are not what :func:`joined` returns.
    """

    def __init__(self, reader: Reader, loader: Stateful | None, *, rank: int, ranks: int, replicas: int) -> None:
        self.differences: list[str] = []
        self._path = reader.path
        self._loader = loader
        self._saved: dict[str, Any] | None = None
        self._is_lost = False
        content = reader.manifest.content
        if content.get("loaders") is not None:
            self._saved = _chosen(content, rank, ranks, replicas)
            helper_state.check(self._saved, _NAME, self._tensor)
        if loader is None:
            self._is_lost = content.get("loaders") is not None and _had_one(content, rank, ranks, replicas)
            return
        if self._saved is not None:
            self.differences = helper_state.differences(loader, _NAME, self._saved)
        elif content.get("loaders") is None:
            self.differences = ["loader= is given, and none was saved (leave it out, and its data begin anew)"]
        else:
            self.differences = [
                f"loaders were saved by {len(content['ranks'])} ranks in {len(content['buffers'])} replicas, and none "
                f"of their states is that of rank {rank} of {ranks} in {replicas} (go on with the ranks of then, or "
                "leave loader= out, and its data begin anew)"
            ]

    def restore(self) -> None:
        if self._loader is not None:
            helper_state.restore(self._loader, self._saved, self._tensor)
        elif self._is_lost:
            logger.warning("%s has the state of a loader, and no loader= is given: its data begin anew", self._path)

    def _tensor(self, name: str) -> Tensor:
        tensors = {} if self._saved is None else self._saved.get("tensors")
        try:
            code, shape, text = tensors[name]  # type: ignore[index]
            data = bytes.fromhex(text)
            if len(data) != DTYPES[code].itemsize * math.prod(shape):
                raise ValueError(f"{len(data)} bytes for the shape {shape}")
            tensor = empty(DTYPES[code], tuple(shape))
            if data:
                bytes_of(tensor)[:] = data
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BadValue(f"the tensor {name!r:.200} of the loader cannot be read: {error!r:.200}") from error
        return tensor


def _chosen(content: Mapping[str, Any], rank: int, ranks: int, replicas: int) -> dict[str, Any] | None:
    """The state for a rank; None if there is none, or several."""
    states, numbers = _lists(content["loaders"])
    before = len(content["buffers"])
    if len(numbers) != len(content["ranks"]) or not all(each is None or _is_one(each, states) for each in numbers):
        raise BadValue("the loaders are not a list of every rank's")
    own = numbers[rank] if (ranks, replicas) == (len(numbers), before) else None
    if own is None and replicas == before:
        of_replica = {number for number in numbers[rank % replicas :: replicas] if number is not None}
        own = of_replica.pop() if len(of_replica) == 1 else None
    return None if own is None else states[own]


def _had_one(content: Mapping[str, Any], rank: int, ranks: int, replicas: int) -> bool:
    """Whether a rank would be expected to have a loader, as it or those in its place then had one."""
    _, numbers = _lists(content["loaders"])
    before = len(content["buffers"])
    if replicas != before:
        return True  # no rank's data go on
    if ranks == len(numbers):
        return numbers[rank] is not None
    of_replica = [number is not None for number in numbers[rank % replicas :: replicas]]
    return any(of_replica) if rank < replicas else all(of_replica)  # of the first stage, which takes the data


def _lists(loaders: Any) -> tuple[list[Any], list[Any]]:
    states, numbers = (loaders.get("states"), loaders.get("ranks")) if isinstance(loaders, dict) else (None, None)
    if not isinstance(states, list) or not isinstance(numbers, list):
        raise BadValue("the loaders are not a table of states and ranks")
    return states, numbers


def _is_one(number: Any, states: Sequence[Any]) -> bool:
    return is_count(number) and number < len(states) and isinstance(states[number], dict)
