"""The values of one forward of one stage: what arrived, what stands for the others, and what the next stage gets."""

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
        boundary: where the stage ends: its values are sent.
        arrived: from the stage before.
        watch: over the first forward of a kind, which it sees as a whole. None for a later one: then a watch sees only
            calls that are given what holds nothing here.

    Attributes:
        stand_ins: for values that have not come to this stage.
        watch: knows what holds nothing here.
        captured: values that the next stage gets, as they are when the forward has ended.
        sent: all of which it gets.
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
        """What arrived, or a stand-in."""
        if key in self._arrived:
            return self._arrived[key]
        value = self._rehearsal.values[key]
        return self.stand_ins.make(value.shape, value.dtype)

    def overwrite(self, target: Tensor, key: Key) -> None:
        """The target becomes what a skipped call made of it."""
        arrived = self._arrived.get(key)
        if arrived is None:
            self.watch.mark(target)
            return
        with torch.set_grad_enabled(arrived.requires_grad):
            target.copy_(arrived)
        self.capture(key, target)  # the stage may go on writing to it

    def capture(self, key: Key, tensor: Any) -> None:
        """This is the value now, if it is sent."""
        if key in self.sent:
            if not isinstance(tensor, Tensor) or tensor.shape != self._rehearsal.values[key].shape:
                raise SplitError(
                    f"{key} is {shown(tensor)}; in the rehearsal it was "
                    f"{shown_value(self._rehearsal.values[key].shape)}"
                )
            self.captured[key] = tensor

    # ---- what is not there ------------------------------------------------------------------------------------------

    def missing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those that hold nothing here."""
        return [tensor for tensor in tensors if self.watch.what(tensor)]

    def followed(self, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """For a call that every stage makes, of these tensors."""
        return nullcontext() if self._is_watched or not self.missing(tensors) else self.watch

    @contextmanager
    def strictly(self, missing: Sequence[Tensor]) -> Iterator[None]:
        """What the stage computes of its own reads nothing that is not there.

        Args:
            missing: of what it is given; may be read where only the shape matters. In a later forward that goes the way
                of the first it is empty nearly always, and nothing needs to be watched.
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
