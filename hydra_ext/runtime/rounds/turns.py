"""Process state of each microbatch of a round: random state, attributes set on modules, shared generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.runtime.rounds.draws import DrawOrder
from hydra_ext.runtime.rounds.isolation import Attributes, Surroundings, TrainedParameters
from hydra_ext.runtime.rounds.order import Order


class Turns:
    """Microbatches that take turns in one process. Each turn begins with the state that the microbatch's last one left.

    Args:
        device: Device of the run.
        core: Core of the run.
        model: Model whose attributes are swapped.
        order: Order of reads and writes of state that modules hold.
        seeds: Seed of each microbatch's first random state.
        generators: Generators that modules hold, which the microbatches share.

    Attributes:
        attributes: Attributes that microbatches set on modules.
        draws: Draws from the shared generators.
        trained: Parameters that microbatches train.
    """

    def __init__(
        self,
        core: _C.PagedModel,
        device: torch.device,
        model: nn.Module,
        order: Order,
        seeds: Sequence[int],
        generators: Iterable[object],
    ) -> None:
        self.trained = TrainedParameters(core.blocks, alone=len(seeds) == 1)
        self.attributes = Attributes(model, order, alone=len(seeds) == 1)
        self._device = device
        self._caller = Surroundings(device)
        self._own = [Surroundings(device) for _ in seeds]
        for own, seed in zip(self._own, seeds, strict=True):
            own.seed(seed)
        self.draws = DrawOrder(generators)

    @contextmanager
    def turn_of(self, index: int, *, keep: bool = False, backward: bool = False) -> Iterator[None]:
        """A context with the process state of this microbatch.

        Args:
            index: Index of the microbatch.
            keep: Whether attributes that the turn sets on modules are kept for the microbatch.
            backward: Whether the turn is part of a backward.
        """
        own = self._own[index]
        own.restore()
        self.attributes.begin_turn(index, backward=backward)
        self.trained.begin_turn(index)
        try:
            yield
        finally:
            self.attributes.end_turn(index, keep=keep)
            self.trained.end_turn(index, keep=keep)
            self.draws.end_turn(index)
            own.note()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A context whose turns repeat the first microbatch without changing its state."""
        own = self._own[0]
        self._own[0] = Surroundings(self._device)
        try:
            yield
        finally:
            self._own[0] = own

    def restore_caller(self) -> None:
        """Restores the caller's process state."""
        self._caller.restore()
