"""Arrays, objects, iterators and large tensors that modules hold are after an undone round what a loop would leave."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ext.runtime.rounds.undoing.module_contents import Copies, ModuleContents
from hydra_ext.state.iterators import position
from support.rounds.undone import FAILURES, WIDTH, Failure, Layer, Stack, assert_is_the_loop


@dataclass
class Statistics:
    calls: int = 0
    mean: float = 0.0
    history: list[float] = field(default_factory=list)


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Counts(Layer):
    """What it writes to, it reads in the next call.

    Args:
        held: what it writes to.
        advance: takes that and the input; gives the number of the call.
    """

    def __init__(self, held: Any, advance: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.held = held
        self.advance = advance

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.advance(self.held, x) / 100))

    def left(self) -> Any:
        return self.advance(self.held, torch.ones(1, 1))


def _array(held: Any, x: Tensor) -> float:
    held += 1
    return float(held.ravel()[0])


def _objects(held: list[Any], _x: Tensor) -> float:
    held.append(Slots())
    held[0].calls += 1
    return float(held[0].calls + len(held))


def _dataclass(held: Statistics, x: Tensor) -> float:
    held.calls += 1
    held.mean = 0.9 * held.mean + 0.1 * float(x.detach().mean())
    held.history.append(held.mean)
    return held.calls + held.mean + len(held.history)


class Numbered:
    """Counted by its class."""

    calls: ClassVar[int] = 0
    seen: ClassVar[list[int]] = []


def _numbered() -> Numbered:
    Numbered.calls = 0
    Numbered.seen.clear()
    return Numbered()


def _class(held: Numbered, x: Tensor) -> float:
    type(held).calls += 1
    held.seen.append(len(x))
    return 0.0


def _hidden(held: list[nn.BatchNorm1d], x: Tensor) -> float:
    with torch.no_grad():
        norm = held[0]
        norm.momentum = 0.9 * (norm.momentum or 0)
        return float(norm(x.detach().repeat(2, WIDTH // x.shape[1])).mean() + norm.running_mean.sum() + norm.momentum)  # type: ignore[union-attr]


def _iterator(held: Iterator[int], _x: Tensor) -> float:
    return float(next(held))


def _pair(held: tuple[Iterator[int], Any], _x: Tensor) -> float:
    return float(next(held[0]))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], float]]] = {
    "array": (lambda: np.zeros((2, 3)), _array),
    "large array": (lambda: np.zeros(2**18 + 1), _array),
    "array in an object": (lambda: Statistics(history=np.zeros(1)), lambda it, x: _array(it.history, x)),  # type: ignore[arg-type]
    "dataclass": (Statistics, _dataclass),
    "objects in a list": (lambda: [Slots()], _objects),
    "class": (_numbered, _class),
    "module that is registered nowhere": (lambda: [nn.BatchNorm1d(WIDTH)], _hidden),
    "count": (itertools.count, _iterator),
    "count by threes": (lambda: itertools.count(-1, 3), _iterator),
    "iterator": (lambda: iter(range(1000)), _iterator),
    "iterator in a tuple": (lambda: (iter([*range(1000)]), None), _pair),
    "large tensor": (lambda: torch.zeros(2**18 + 1), _array),
    "large tensor in an object": (lambda: Statistics(mean=torch.zeros(2**18 + 1)), lambda it, x: _array(it.mean, x)),  # type: ignore[arg-type]
}


def left(model: Stack) -> list[Any]:
    return [each.left() for each in model.layers]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_layers_hold_is_as_in_a_loop(kind: Any, failure: Failure | None) -> None:
    make, advance = kind
    assert_is_the_loop(lambda: Stack(lambda: Counts(make(), advance)), failure, extra=left)
    if make is _numbered:
        assert Numbered.calls == 36 + 3
        assert len(Numbered.seen) == 36 + 3


class AroundLayers(Stack):
    """It writes between its layers, where microbatches take turns."""

    def __init__(self, held: Any, advance: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.held = held
        self.advance = advance

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * (1 + self.advance(self.held, x) / 100))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ("class", "iterator in a tuple")])
def test_what_is_written_to_around_layers_is_as_in_a_loop(kind: str) -> None:
    make, advance = KINDS[kind]
    report = assert_is_the_loop(
        lambda: AroundLayers(make(), advance), extra=lambda it: advance(it.held, torch.ones(1, 1))
    )
    assert report.refusals == 1


@pytest.mark.parametrize("kind", ["array", "count", "iterator", "large tensor"])
def test_by_default_it_is_as_in_a_loop(kind: str) -> None:
    make, advance = KINDS[kind]
    around = lambda: AroundLayers(make(), advance)  # noqa: E731
    assert_is_the_loop(around, extra=lambda it: advance(it.held, torch.ones(1, 1)), activations="auto")


class Numbers:
    """An iterator of a user's."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        self.next += 1
        return self.next


# None can be set back, nor copied without what it goes through.
AROUND_OTHERS: dict[str, Callable[[], Iterator[int]]] = {
    "generator": lambda: (number for number in range(1000)),
    "map": lambda: map(int, range(1000)),
    "filter": lambda: filter(bool, iter(range(1000))),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "cycle further on": lambda: itertools.islice(itertools.cycle([1, 2, 3]), 3, None),
    "chain": lambda: itertools.chain([1, 2], range(1000)),
    "islice": lambda: itertools.islice(itertools.count(), 1000),
    "accumulate": lambda: itertools.accumulate(range(1000)),
    "map of a zip of enumerate": lambda: map(itemgetter(0), zip(range(1000), enumerate("a" * 1000), strict=True)),
}


@pytest.mark.parametrize("kind", AROUND_OTHERS)
def test_an_iterator_that_no_copy_can_be_made_of_is_told(kind: str) -> None:
    def made() -> Stack:
        return Stack(lambda: Counts(AROUND_OTHERS[kind](), _iterator))

    assert_is_the_loop(made, extra=left)
    name = type(AROUND_OTHERS[kind]()).__name__
    with pytest.raises(RuntimeError, match=f"a {name}, which a module holds, has advanced"):
        assert_is_the_loop(made, FAILURES[1])


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_a_users_iterator_below_one_of_pythons_is_set_back(failure: Failure | None) -> None:
    assert_is_the_loop(lambda: Stack(lambda: Counts(map(int, Numbers()), _iterator)), failure, extra=left)


@pytest.mark.every_case
@pytest.mark.parametrize("made", [*AROUND_OTHERS.values()], ids=[*AROUND_OTHERS])
def test_a_position_tells_how_far_an_iterator_has_come(made: Callable[[], Iterator[int]]) -> None:
    iterator = made()
    seen: list[Any] = []
    for _ in range(7):  # one that goes round is where it was after that
        here = position(iterator)
        assert here == position(iterator)
        assert here not in seen
        seen.append(here)
        next(iterator)


def test_nothing_is_made_for_the_empty_containers_of_a_module() -> None:
    """Every module has a dozen of hooks; a round would take longer to begin than to run."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(200)))
    ModuleContents.of([model], Copies())
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        contents = ModuleContents.of([model], Copies())
        made = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert contents.written() == []
    assert made < 5 * 200
