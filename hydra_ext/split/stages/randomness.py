"""Random numbers that do not depend on how many stages there are: every event has a stream of its own."""

from __future__ import annotations

import torch

from hydra_ext.split.stage_program import event_seed
from hydra_ext.state.randomness import generators, seed_generators


class EventRandomness:
    """Seeds torch's generators, Python's and numpy's as :func:`event_seed` says, for one microbatch.

    ``torch.manual_seed`` does the same for all devices, and takes a hundred times as long.
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
        """What the generators were last seeded with when the event begins."""
        return self._seed if event == 0 else event_seed(self._seed, event - 1, after=True)

    def _set(self, seed: int) -> None:
        seed_generators(seed, self._generators)
