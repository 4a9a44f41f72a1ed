"""A sample's place in its epoch, from which all of its random numbers follow."""

from __future__ import annotations

import contextvars
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch

_SEEDS = 2**62
_NUMPY_SEEDS = 2**32


@dataclass(frozen=True)
class Place:
    """Where a stage makes a sample.

    Attributes:
        seed: Of the pipeline.
        epoch: Number of the epoch, from 0 on.
        number: Of the sample in the epoch; of a dataset's sample, its key.
    """

    seed: int
    epoch: int
    number: int | str

    def derived(self) -> int:
        """A seed for this place: always the same one, and unlike those of other places."""
        text = f"{self.seed}/{self.epoch}/{self.number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _SEEDS


_here: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


def here() -> Place:
    """The place of the sample that is made now.

    Raises:
        LookupError: No stage makes one.
    """
    place = _here.get()
    if place is None:
        raise LookupError("no sample is made now: random numbers of a place are for functions of stages")
    return place


@contextmanager
def at(place: Place, *, seeded: bool) -> Iterator[None]:
    """While it lasts, a sample is made at this place.

    Args:
        seeded: Whether the generators of torch, Python and numpy, which are the whole process's, begin with its seed.
    """
    token = _here.set(place)
    try:
        if seeded:
            seed = place.derived()
            torch.default_generator.manual_seed(seed)  # a worker has no GPU
            random.seed(seed)
            numpy.random.seed(seed % _NUMPY_SEEDS)
        yield
    finally:
        _here.reset(token)


def generator() -> torch.Generator:
    """A generator of torch for the sample that is made now. In threads, where others draw too, it is the one to use."""
    return torch.Generator().manual_seed(here().derived())


def numpy_generator() -> numpy.random.Generator:
    """A generator of numpy for the sample that is made now."""
    return numpy.random.default_rng(here().derived())
