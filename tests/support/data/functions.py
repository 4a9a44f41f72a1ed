"""Datasets and functions of stages that worker processes import."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset


def drawn(index: int) -> dict[str, Any]:
    """Random numbers of all generators that a worker seeds."""
    return {
        "index": index,
        "torch": torch.rand(3),
        "numpy": numpy.random.rand(3),
        "python": random.random(),
    }


def rows(index: int) -> dict[str, Any]:
    """A sample whose memory is large enough for shared memory: a tensor and an array."""
    return {"tensor": torch.full((64, 40), float(index)), "array": numpy.full(3000, index, dtype=numpy.int32)}


class Drawn(Dataset[dict[str, Any]]):
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return drawn(index)


class Rows(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return rows(index)


class Many(Drawn):
    """Makes a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        noise = torch.rand(len(indices))
        return [{"index": index, "noise": noise[i]} for i, index in enumerate(indices)]


class Columns(Drawn):
    """Makes a whole batch at once, as a table has it."""

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(indices)}


class Stream(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(range(self._samples))


def with_noise(sample: Any) -> dict[str, Any]:
    return {"sample": sample, "noise": torch.rand(2)}


def same(value: Any) -> Any:
    return value


def process_of(value: Any) -> tuple[Any, int]:
    return value, os.getpid()


class Waits:
    """Its calls end once a file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, value: Any) -> Any:
        while not self._file.exists():
            time.sleep(0.001)
        return value


class Kills:
    """A worker that dies of some items: so many times each."""

    def __init__(self, folder: Path, items: set[int], times: int) -> None:
        self._folder = folder
        self._items = items
        self._times = times

    def __call__(self, item: int) -> dict[str, Any]:
        if item in self._items:
            deaths = self._folder / str(item)
            count = len(deaths.read_text()) if deaths.exists() else 0
            if count < self._times:
                deaths.write_text("x" * (count + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return rows(item)


class CannotTravel(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raises(item: int) -> int:
    if item % 5 == 3:
        raise ValueError(f"no sample {item}")
    if item % 5 == 4:
        raise CannotTravel(item, item)
    return item


def large(item: int) -> torch.Tensor:
    return torch.zeros(item, dtype=torch.uint8)


class BreaksWhenLoaded:
    def __reduce__(self) -> Any:
        return int, ("no number",)

    def __call__(self, item: Any) -> Any:
        return item


class Holds:
    """A function with a large tensor and many objects, of which it reads all pages for each item, and collects."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held
        self._objects = [[str(number)] for number in range(400_000)]

    def __call__(self, item: int) -> int:
        gc.collect()
        return int(self._held[::4096].sum()) + item


class Large:
    """A function with some memory."""

    def __init__(self) -> None:
        self._held = bytes(2**21)

    def __call__(self, item: int) -> int:
        return item


def nested(item: int) -> torch.Tensor:
    parts = [torch.full((size,), item) for size in (1, 2)]
    return torch.nested.nested_tensor(parts)


class CannotBeMade:
    """A sample that only the worker can have."""

    def __init__(self, _item: int) -> None:
        pass

    def __reduce__(self) -> Any:
        return _not_here, ()


def _not_here() -> None:
    raise KeyError("not here")


class DoublesInPlace:
    """Changes its item, and dies of one the first time that it has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        number = int(item["array"][0])
        item["tensor"].mul_(2)
        if number == 3 and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item


class LeavesAChild:
    """Its worker waits, and has a child that has the worker's connection, too. Both end once a file is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, item: int) -> int:
        child = os.fork() == 0
        if child:
            (self._folder / "child").touch()
        while not (self._folder / "go_on").exists():
            time.sleep(0.001)
        if child:
            (self._folder / "gone").touch()
            os._exit(0)
        return item


_kept: list[Any] = []


class Slow:
    """Waits as for a disk or a network, and has some memory in each worker."""

    def __init__(self, seconds: float, nbytes: int) -> None:
        self._seconds = seconds
        self._nbytes = nbytes

    def __call__(self, index: int) -> dict[str, Any]:
        if not _kept:
            _kept.append(b"x" * self._nbytes)
        time.sleep(self._seconds)
        return rows(index)


class SlowOrOdd:
    """Waits, and then fails for even numbers."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, index: int) -> int:
        time.sleep(self._seconds)
        if index % 2 == 0:
            raise ValueError(f"{index} is even")
        return index


class Grows:
    """Keeps some memory of each item once a file is there."""

    def __init__(self, asked: Path, nbytes: int) -> None:
        self._asked = asked
        self._nbytes = nbytes

    def __call__(self, index: int) -> int:
        if self._asked.exists():
            _kept.append(b"x" * self._nbytes)
        return index
