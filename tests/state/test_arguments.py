"""The tensors in arguments, and copies of all that is in them."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, OrderedDict, UserDict, deque
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.state.arguments import Arguments, tensors_in


@dataclass
class Data:
    x: Any


@dataclass(frozen=True)
class Frozen:
    x: Any


class Pair(NamedTuple):
    x: Any
    y: Any


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


class Own:
    """Copied by its class, with a list of its own."""

    def __init__(self, x: Any) -> None:
        self.x = [x]

    def __copy__(self) -> Own:
        return Own(self.x[0])


class Uncopied:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __copy__(self) -> Uncopied:
        raise TypeError("there is one of these")


class Kind(Enum):
    ONE = [1]  # noqa: RUF012


LOGGER = logging.getLogger("hydra_ext.tests.arguments")
NESTED: dict[str, Any] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, 1),
    "pair": lambda x: Pair(x, 1),
    "dict": lambda x: {"x": x},
    "ordered": lambda x: OrderedDict(x=x),
    "deque": lambda x: deque([x], maxlen=3),
    "mapping": lambda x: UserDict(x=x),
    "dataclass": Data,
    "frozen": Frozen,
}
OBJECTS: dict[str, Any] = {"namespace": lambda x: SimpleNamespace(x=x), "slots": Slotted, "own": Own}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_are_found_in_what_is_nested(name: str) -> None:
    make, one, other = NESTED[name], torch.ones(1), torch.ones(2)
    assert [*map(id, tensors_in([make(one), make([make(other)])]))] == [id(one), id(other)]


def _tensor_of(value: Any) -> Tensor:
    (found,) = Arguments(value).tensors
    return found


@pytest.mark.parametrize("name", [*NESTED, *OBJECTS])
@pytest.mark.parametrize("outer", [*NESTED, *OBJECTS])
def test_copies_have_other_tensors_however_deep(name: str, outer: str) -> None:
    made = NESTED | OBJECTS
    tensor, other = torch.ones(1), torch.ones(1)
    value = made[outer](made[name](tensor))
    filled = Arguments(value).filled([other])
    assert type(filled) is type(value)
    assert _tensor_of(filled) is other
    assert _tensor_of(value) is tensor


def test_what_is_in_two_places_or_in_itself_is_so_in_a_copy() -> None:
    tensor = torch.ones(1)
    inner: dict[str, Any] = {"x": tensor}
    value = SimpleNamespace(one=inner, other=[inner, tensor])
    value.me = value
    arguments = Arguments(value)
    assert len(arguments.tensors) == 1
    filled = arguments.filled(arguments.tensors)
    assert filled.me is filled is not value
    assert filled.one is filled.other[0] is not inner
    assert filled.other[1] is tensor


def test_counters_are_those_from_before() -> None:
    value = {"calls": Counter(a=1), "seen": {1}, "last": deque([1]), "object": Slotted([1])}
    arguments = Arguments(value)
    value["calls"]["a"] += 1  # type: ignore[index]
    value["seen"].add(2)  # type: ignore[attr-defined]
    value["last"].append(2)  # type: ignore[attr-defined]
    value["object"].x.append(2)  # type: ignore[attr-defined]
    for _ in range(2):
        filled = arguments.filled(())
        assert (filled["calls"], filled["seen"], filled["last"]) == ({"a": 1}, {1}, deque([1]))
        assert filled["object"].x == [1]
        filled["object"].x.append(3)


@pytest.mark.parametrize(
    "shared", [LOGGER, Kind.ONE, threading.Event(), Uncopied([1]), nn.Linear(2, 2), print, int, random.Random(3)]
)
def test_what_is_shared_stays_as_it_is(shared: Any) -> None:
    before = dict(getattr(shared, "__dict__", {}))
    filled = Arguments([shared]).filled(())
    assert filled[0] is shared
    assert all(shared.__dict__[name] is value for name, value in before.items())


def test_sources_of_random_numbers_are_told() -> None:
    sources = [random.Random(3), torch.Generator()]
    arguments = Arguments({"inner": SimpleNamespace(source=sources[0]), "other": sources[1]})
    assert arguments.sources == sources
