"""The part of a checkpoint that one process loads, a run or a rank of a pipeline, and the order of loading it.

Runs and ranks differ in their tensors, in their optimizers, and in the older weights that a pipeline's next steps use.
All that they have in common is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hydra_ext.checkpoint import helper_state, loading, model_state, optimizer_state
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.checkpoint.format.values import BadValue, decode
from hydra_ext.checkpoint.helper_state import Stateful
from hydra_ext.checkpoint.model_state import Named
from hydra_ext.checkpoint.randomness import BadRandomness, Randomness
from hydra_ext.errors import CheckpointError

logger = logging.getLogger(__name__)

Helpers = Mapping[str, Sequence[Stateful | None]]
"""The caller's schedules and scalers, by the names "schedule" and "scaler"; None for a missing one."""


@contextmanager
def decoded(reader: Reader) -> Iterator[None]:
    """Turns errors of decoding into errors of the checkpoint.

    Raises:
        CheckpointError: A value or a random state inside cannot be decoded.
    """
    try:
        yield
    except (BadValue, BadRandomness) as error:
        raise CheckpointError(f"{reader.path}: {error}", file=reader.path) from error


class SavedState:
    """A checkpoint that a process compares with its own state, and then loads.

    Args:
        tensors: Tensors of the model that this process holds.

    Attributes:
        content: The checkpoint's JSON content, beside tensors.
        wanted: Names of the tensors in the section "training" that this process will read. It grows with each name
            that is decoded.

    Raises:
        BadValue: A value cannot be decoded.
    """

    def __init__(self, reader: Reader, tensors: Sequence[Named], helpers: Helpers) -> None:
        self.content: Mapping[str, Any] = reader.manifest.content
        self.wanted: set[str] = set()
        self._reader = reader
        self._tensors = tensors
        self._helpers = helpers
        self._rank = 0
        self._random: Randomness | None = None
        self._buffers: list[tuple[Tensor, str]] = []
        self._check_values()

    # ---- checking ---------------------------------------------------------------------------------------------------

    def _check_values(self) -> None:
        content = self.content
        if content.get("optimizer") is not None:
            optimizer_state.check(content["optimizer"], lambda name: self._stand_in("optimizer", name))
        for name in self._helpers:
            helper_state.check(content.get(name), name, self.stand_in)
        for name in ("ranks", "buffers"):
            if not isinstance(content.get(name), list) or not content[name]:
                raise BadValue(f"{name} is not a list of every rank's state")

    def _stand_in(self, section: str, name: str) -> Tensor:
        self._reader.manifest.tensors[section][name]  # raises KeyError for an unknown tensor
        return torch.empty(0, device="cpu")

    def stand_in(self, name: str) -> Tensor:
        """A stand-in for a tensor of the section "training", for :func:`decode`. Notes that the tensor will be read.

        Raises:
            KeyError: There is no tensor of this name.
        """
        self.wanted.add(name)
        return self._stand_in("training", name)

    def stored(self, reference: Any, like: Tensor, what: str, place: str | None = None) -> str:
        """The name of the tensor in the section "training" that a reference stands for.

        Args:
            like: Tensor of the expected shape.
            what: Name of the value in messages.
            place: Place of the value when it was encoded; see :func:`decode`.

        Raises:
            BadValue: The reference is not to a tensor of that shape.
        """
        if isinstance(decode(reference, self.stand_in, place), Tensor):
            name = str(reference["name"])
            if self._reader.manifest.tensors["training"][name].span.shape == tuple(like.shape):
                return name
        raise BadValue(f"{what} is not a tensor of shape {list(like.shape)}")

    def helper_differences(self) -> list[str]:
        """Differences between the caller's schedules and scalers and the saved ones, a line each."""
        return [
            line
            for name, helpers in self._helpers.items()
            for helper in helpers
            for line in helper_state.differences(helper, name, self.content.get(name))
        ]

    def choose(self, *, rank: int, replica: int) -> None:
        """Selects this process's random states, and its replica's buffers that differ from the first replica's.

        Raises:
            BadValue, BadRandomness: A value is not one that a save writes.
        """
        self._rank = rank
        ranks, buffers = self.content["ranks"], self.content["buffers"]
        self._random = Randomness.of(ranks[rank]) if rank < len(ranks) else None
        found = buffers[replica] if replica < len(buffers) else {}
        if not isinstance(found, dict):
            raise BadValue(f"the buffers of replica {replica} are not a table")
        unknown = found.keys() - self._reader.manifest.tensors.get("model", {}).keys()
        if unknown:
            raise BadValue(f"replica {replica} has a buffer {min(unknown)!r:.200} that the saved model does not have")
        for named in self._tensors:
            if named.name in found:
                what = f"the buffer {named.name!r:.200} of replica {replica}"
                self._buffers.append((named.tensor, self.stored(found[named.name], named.tensor, what)))

    # ---- loading ----------------------------------------------------------------------------------------------------

    def put(
        self,
        put_optimizers: Callable[[], None],
        parameters: Iterable[Tensor],
        device: torch.device,
        *,
        put: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        """Loads the checkpoint: helpers, weights, optimizers, random states.

        Weights come before the optimizers, whose state may extend them (masters).

        Args:
            put_optimizers: Loads the optimizers, and any other state that has to follow the weights.
            parameters: Parameters whose gradients are dropped.
            device: Device where the forward runs.
            put: Called with each tensor of the model before it is written to.

        Raises:
            CheckpointError: A file has changed since it was checked. The training is partly loaded.
        """
        with loading.half_done():
            for name, helpers in self._helpers.items():
                for helper in helpers:
                    helper_state.restore(helper, self.content.get(name), self.read)
            loading.put_model(self._reader, self._tensors, put=put)
            for tensor, stored in self._buffers:
                model_state.put(tensor, self.read(stored))
            put_optimizers()
        for parameter in parameters:
            parameter.grad = None
        self._put_randomness(device)

    def read(self, name: str) -> Tensor:
        """Reads a tensor of the section "training"."""
        return self._reader.read("training", name)

    def _put_randomness(self, device: torch.device) -> None:
        if self._random is None:
            logger.warning(
                "%s has no random states of rank %d, as fewer ranks saved it: the rank keeps its own",
                self._reader.path,
                self._rank,
            )
        elif not self._random.restore(device):
            logger.warning("%s has no random state of a GPU: this GPU keeps its own", self._reader.path)
