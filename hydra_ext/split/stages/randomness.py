"""Random numbers that do not depend on the number of stages: every event has a stream of its own."""

from __future__ import annotations

import torch

from hydra_ext.split.stage_program import event_seed
from hydra_ext.state.randomness import generators, seed_generators


class EventRandomness:
    """Seeds torch's, Python's and numpy's generators for one microbatch, by :func:`event_seed`.

    Of torch's generators it seeds those that a forward on the device draws from. ``torch.manual_seed`` seeds those of
    all devices, and takes a hundred times as long.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generators = generators(device)
        self._seed = seed

    def begin(self) -> None:
        self._set(self._seed)

    def enter(self, event: int) -> None:
        self._set(event_seed(self._seed, event))

    def leave(self, event: int) -> None:
        self._set(event_seed(self._seed, event, after=True))

    def before(self, event: int) -> int:
        """The last seed that the generators got before the event's own."""
        return self._seed if event == 0 else event_seed(self._seed, event - 1, after=True)

    def _set(self, seed: int) -> None:
        seed_generators(seed, self._generators)
