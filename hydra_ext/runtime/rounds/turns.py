"""The process as each microbatch of a round knows it: random state, what is set on modules, shared generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hydra_ext.runtime.rounds.draws import DrawOrder
from hydra_ext.runtime.rounds.isolation import Attributes, Surroundings
from hydra_ext.runtime.rounds.order import Order


class Turns:
    """Microbatches take turns in one process. Each goes on in the process as it left it.

    Args:
        order: in which what modules hold is read and written.
        seeds: of the random state that each microbatch begins with.
        generators: that modules hold, and the microbatches share.

    Attributes:
        attributes: what microbatches set on modules.
        draws: from the generators that they share.
    """

    def __init__(
        self, device: torch.device, model: nn.Module, order: Order, seeds: Sequence[int], generators: Iterable[object]
    ) -> None:
        self.attributes = Attributes(model, order, alone=len(seeds) == 1)
        self._device = device
        self._caller = Surroundings(device)
        self._own = [Surroundings(device) for _ in seeds]
        for own, seed in zip(self._own, seeds, strict=True):
            own.seed(seed)
        self.draws = DrawOrder(generators)

    @contextmanager
    def turn_of(self, index: int, *, keep: bool = False, backward: bool = False) -> Iterator[None]:
        """The process as this microbatch knows it. ``keep``: what it sets on modules counts."""
        own = self._own[index]
        own.restore()
        self.attributes.begin_turn(index, backward=backward)
        try:
            yield
        finally:
            self.attributes.end_turn(index, keep=keep)
            self.draws.end_turn(index)
            own.note()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Turns inside repeat the first microbatch: its own state stays as it is."""
        own = self._own[0]
        self._own[0] = Surroundings(self._device)
        try:
            yield
        finally:
            self._own[0] = own

    def restore_caller(self) -> None:
        """The process is the caller's again."""
        self._caller.restore()
