"""What it takes to compress saved tensors: measured in a run, for the planner of activations."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hydra_ext import codec
from hydra_ext.activations.given import CodedBytes, GivenTreatments
from hydra_ext.plan.segments import Coding

_NUMBERS = 2**18
_TRIALS = 3


class CodingFigures:
    """Ratios of the modules that may be compressed, from a measured microbatch, and the codec's speed.

    Args:
        given: What the user allows.
        device: Device that compresses.
    """

    def __init__(self, given: GivenTreatments, device: torch.device) -> None:
        self._given = given
        self._device = device
        self._before: dict[str, CodedBytes] = {}
        self._found: dict[str, CodedBytes] = {}
        self._speed: float | None = None

    def begin(self) -> None:
        """A microbatch begins, in which all that may be is compressed."""
        self._before = self._given.coded()

    def end(self) -> None:
        """Its backward has ended."""
        now = self._given.coded()
        self._found = {name: coded - self._before.get(name, CodedBytes()) for name, coded in now.items()}

    def of(self, members: Sequence[str], nbytes: int) -> Coding | None:
        """The coding of modules that save so many fresh bytes together; None if none of these were compressed."""
        inside = [
            coded
            for name, coded in self._found.items()
            if any(name == member or name.startswith(f"{member}.") for member in members)
        ]
        coded = sum(inside, CodedBytes())
        if not coded.encoded:
            return None
        whole = coded.encoded + coded.exact
        return Coding(
            stream_bytes=nbytes * (coded.streams + coded.exact) // whole,
            seconds=nbytes * coded.encoded / whole / self._bytes_per_second(),
        )

    def _bytes_per_second(self) -> float:
        """Of one number that is compressed and decoded."""
        if self._speed is None:
            generator = torch.Generator().manual_seed(0)
            numbers = torch.randn(_NUMBERS, generator=generator).to(self._device)
            self._speed = numbers.nbytes / min(self._seconds(numbers) for _ in range(_TRIALS))
        return self._speed

    def _seconds(self, numbers: torch.Tensor) -> float:
        self._settle()
        began = time.perf_counter()
        codec.decompress(codec.compress(numbers, error_bound=0.01))
        self._settle()
        return max(time.perf_counter() - began, 1e-9)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
