"""What a checkpoint holds for one process, and the order in which it takes it: a run, or a rank of a pipeline.

These differ in the tensors that they hold, in their optimizers, and in the older weights that a pipeline's next steps
use. The rest is the same, and is here.
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
"""The caller's schedules and scalers, by the names "schedule" and "scaler"; None for one that is not there."""


@contextmanager
def decoded(reader: Reader) -> Iterator[None]:
    """
    Raises:
        CheckpointError: from inside, where a value or a random state is none.
    """
    try:
        yield
    except (BadValue, BadRandomness) as error:
        raise CheckpointError(f"{reader.path}: {error}", file=reader.path) from error


class SavedState:
    """A checkpoint that a process compares with what it has, and takes.

    Args:
        tensors: of the model, those that this process holds.

    Attributes:
        content: what the checkpoint holds besides tensors.
        wanted: names of those tensors of the training that this process will read, as far as they are found yet.

    Raises:
        BadValue: something cannot be decoded.
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

    # ---- looking at it ----------------------------------------------------------------------------------------------

    def _check_values(self) -> None:
        content = self.content
        if content.get("optimizer") is not None:
            optimizer_state.check(content["optimizer"], lambda name: self._stand_in("optimizer", name))
        for name in self._helpers:
            helper_state.check(content.get(name), name, self.stand_in)
        for name in ("ranks", "buffers"):
            if not isinstance(content.get(name), list) or not content[name]:
                raise BadValue(f"{name} is no list of what each rank had")

    def _stand_in(self, section: str, name: str) -> Tensor:
        self._reader.manifest.tensors[section][name]  # KeyError where there is none
        return torch.empty(0, device="cpu")

    def stand_in(self, name: str) -> Tensor:
        """For a tensor of the training, which will be read; for :func:`decode`.

        Raises:
            KeyError: there is none of this name.
        """
        self.wanted.add(name)
        return self._stand_in("training", name)

    def stored(self, reference: Any, like: Tensor, what: str, place: str | None = None) -> str:
        """The name of the tensor of the training that a reference stands for.

        Raises:
            BadValue: it is no tensor of that shape.
        """
        if isinstance(decode(reference, self.stand_in, place), Tensor):
            name = str(reference["name"])
            if self._reader.manifest.tensors["training"][name].span.shape == tuple(like.shape):
                return name
        raise BadValue(f"{what} is no tensor of its shape")

    def helper_differences(self) -> list[str]:
        """Between the caller's schedules and scalers and those that were saved, a line each."""
        return [
            line
            for name, helpers in self._helpers.items()
            for helper in helpers
            for line in helper_state.differences(helper, name, self.content.get(name))
        ]

    def choose(self, *, rank: int, replica: int) -> None:
        """Finds what is this process's of what each had: random states, and buffers unlike the first replica's.

        Raises:
            BadValue, BadRandomness: it is not what was saved.
        """
        self._rank = rank
        ranks, buffers = self.content["ranks"], self.content["buffers"]
        self._random = Randomness.of(ranks[rank]) if rank < len(ranks) else None
        found = buffers[replica] if replica < len(buffers) else {}
        if not isinstance(found, dict):
            raise BadValue(f"the buffers of replica {replica} are no table")
        unknown = found.keys() - self._reader.manifest.tensors.get("model", {}).keys()
        if unknown:
            raise BadValue(f"replica {replica} has a buffer {min(unknown)!r:.200} that the model has not")
        for named in self._tensors:
            if named.name in found:
                what = f"the buffer {named.name!r:.200} of replica {replica}"
                self._buffers.append((named.tensor, self.stored(found[named.name], named.tensor, what)))

    # ---- taking it --------------------------------------------------------------------------------------------------

    def put(
        self,
        put_optimizers: Callable[[], None],
        parameters: Iterable[Tensor],
        device: torch.device,
        *,
        put: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        """Weights before the optimizers, whose state adds to them; random states last.

        Args:
            put_optimizers: puts back the optimizers, and what else follows the weights.
            parameters: lose their gradients.
            device: where the forward runs.
            put: called with each tensor of the model before it is written to.

        Raises:
            CheckpointError: a file has changed since it was looked at; the training is partly loaded.
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
        """A tensor of the training."""
        return self._reader.read("training", name)

    def _put_randomness(self, device: torch.device) -> None:
        if self._random is None:
            logger.warning(
                "%s has no random states of rank %d, as fewer ranks were there: it keeps its own",
                self._reader.path,
                self._rank,
            )
        elif not self._random.restore(device):
            logger.warning("%s has no random state of a GPU: that of this one stays", self._reader.path)
