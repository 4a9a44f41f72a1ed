"""Sources of batches for tests of what takes them to a device."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchdata.nodes import BaseNode

SAMPLES = 5
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Example:
    x: Tensor
    name: str
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.x * 2)


def batch_of(number: int) -> dict[str, Any]:
    """A nest of all kinds of containers."""
    x = torch.full((3, 4, 5), float(number))
    return OrderedDict(
        pair=Pair(x, [x.to(torch.int64) + 1, "text", None]),
        example=Example(x + 2, "name"),
        inside={"last": (x.contiguous(memory_format=torch.contiguous_format).transpose(0, 1) + 3, (4, 5))},
        expanded=torch.tensor([float(number)]).expand(6),
        empty=torch.empty(0, 3),
    )


def tensors_in(batch: dict[str, Any]) -> list[Tensor]:
    pair, example = batch["pair"], batch["example"]
    assert type(batch) is OrderedDict
    assert (type(pair), type(pair.second), type(example)) == (Pair, list, Example)
    assert (pair.second[1:], example.name, batch["inside"]["last"][1]) == (["text", None], "name", (4, 5))
    last = batch["inside"]["last"][0]
    return [pair.first, pair.second[0], example.x, example.doubled, last, batch["expanded"], batch["empty"]]


class _Numbered(BaseNode[Any]):
    def __init__(self, items: int | None) -> None:
        super().__init__()
        self._items = items
        self._number = -1

    def reset(self, initial_state: Any = None) -> None:
        super().reset(initial_state)
        self._number = -1 if initial_state is None else initial_state["number"]

    def next(self) -> Any:
        self._number += 1
        if self._number == self._items:
            raise StopIteration
        return self._made(self._number)

    def _made(self, number: int) -> Any:
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        return {"number": self._number}


class Recycled(_Numbered):
    """Gives the same tensors each time, with other numbers in them."""

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__(SAMPLES)
        self.before: Callable[[], object] = list  # called before each
        self._batch = batch_of(0)
        if pinned:
            self._batch["pair"] = Pair(self._batch["pair"].first.pin_memory(), self._batch["pair"].second)

    def _made(self, number: int) -> Any:
        for mine, new in zip(tensors_in(self._batch), tensors_in(batch_of(number)), strict=True):
            if mine.is_contiguous() or mine.stride(0):
                mine.copy_(new)
            else:
                mine[:1].copy_(new[:1])  # an expanded one
        self.before()
        return self._batch


class Unlimited(_Numbered):
    """Gives tensors of this size, full of their number."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self._size = size

    def _made(self, number: int) -> Any:
        return torch.full((self._size,), float(number))
