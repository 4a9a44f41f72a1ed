"""The values of one forward of one stage: those that arrived, stand-ins for others, and those for the next stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hydra_ext.errors import SplitError
from hydra_ext.split.rehearsal.record import Key, Rehearsal
from hydra_ext.split.stages.tensors import StandIns
from hydra_ext.split.stages.watch import StandInWatch


class StageValues:
    """
    Args:
        boundary: Number of the boundary at the end of the stage: its values are sent.
        arrived: Values from the stage before.
        watch: Watch that sees the whole forward, for the first one of a kind. None for a later one: then only calls
            that are given a stand-in are watched.

    Attributes:
        stand_ins: Stand-ins for values that have not come to this stage.
        watch: Watch that knows which tensors hold nothing here.
        captured: Values for the next stage. The tensors have their final content when the forward has ended.
        sent: Keys of all values for the next stage.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        boundary: int,
        arrived: dict[Key, Tensor],
        stand_ins: StandIns,
        watch: StandInWatch | None,
    ) -> None:
        self.stand_ins = stand_ins
        self.watch = watch or StandInWatch(stand_ins, ())
        self.sent = set(rehearsal.boundaries[boundary].values)
        self.captured = {key: tensor for key, tensor in arrived.items() if key in self.sent}
        self._rehearsal = rehearsal
        self._arrived = arrived
        self._is_watched = watch is not None

    def value(self, key: Key) -> Tensor:
        """The value if it arrived, else a stand-in."""
        if key in self._arrived:
            return self._arrived[key]
        value = self._rehearsal.values[key]
        return self.stand_ins.make(value.shape, value.dtype)

    def overwrite(self, target: Tensor, key: Key) -> None:
        """Gives the target the content that a skipped call would have written: the arrived value, or no content."""
        arrived = self._arrived.get(key)
        if arrived is None:
            self.watch.mark(target)
            return
        with torch.set_grad_enabled(arrived.requires_grad):
            target.copy_(arrived)
        self.capture(key, target)  # later writes of this stage must reach the next one

    def capture(self, key: Key, tensor: Any) -> None:
        """Takes the tensor as the value, if the value is sent.

        Raises:
            SplitError: It is no tensor, or has another shape than in the rehearsal.
        """
        if key in self.sent:
            if not isinstance(tensor, Tensor) or tensor.shape != self._rehearsal.values[key].shape:
                raise SplitError(
                    f"{key} is {shown(tensor)}; in the rehearsal it was "
                    f"{shown_value(self._rehearsal.values[key].shape)}"
                )
            self.captured[key] = tensor

    # ---- stand-ins --------------------------------------------------------------------------------------------------

    def missing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among these that hold nothing here."""
        return [tensor for tensor in tensors if self.watch.what(tensor)]

    def followed(self, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Around a call with these tensors that every stage makes: watches it if it is given a stand-in."""
        return nullcontext() if self._is_watched or not self.missing(tensors) else self.watch

    @contextmanager
    def strictly(self, missing: Sequence[Tensor]) -> Iterator[None]:
        """Around a call of the stage's own part: a read of a stand-in's elements raises.

        Args:
            missing: Tensors given to the call that hold nothing here; their shapes may be read. In a forward that is
                not watched as a whole it is nearly always empty, and then the call is not watched.
        """
        if not (self._is_watched or missing):
            yield
            return
        self.watch.strict = True
        try:
            with nullcontext() if self._is_watched else self.watch:
                yield
        finally:
            self.watch.strict = False


def shown(leaf: Any) -> str:
    return shown_value(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)


def shown_value(shape: torch.Size) -> str:
    return f"a tensor of shape {tuple(shape)}"
