"""A loader's state from between two epochs, and states that a loader does not take."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler, SamplerWrapper

from hydra_ext import data
from hydra_ext.errors import InvalidArgument
from support.data import functions
from support.data.batches import digest


def epoch(loader: Any) -> list[str]:
    return [digest(batch) for batch in loader]


def draw(sample: Any) -> list[Any]:
    return [sample, torch.rand(2, generator=data.generator())]


def threaded(**changed: Any) -> data.Loader:
    return data.from_dataset(functions.Rows(9), 2, num_workers=1, method="thread", **changed)


def mixed() -> MultiNodeWeightedSampler[Any]:
    sources = {name: SamplerWrapper(DistributedSampler(range(9), 2, rank)) for rank, name in enumerate("ab")}
    return MultiNodeWeightedSampler(sources, {"a": 0.5, "b": 0.5}, seed=1)


class Places:
    """Has a state, and goes back to its beginning when it has come to its end."""

    def __init__(self, asked: threading.Event | None = None) -> None:
        self._next = 0
        self._asked = asked

    def __iter__(self) -> Iterator[int]:
        while self._next < 15:
            if self._next == 7 and self._asked is not None:
                self._asked.wait(1)
            self._next += 1
            yield self._next
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Asked(data.Prefetch):
    """Its source waits in the middle until it is asked for an item."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        super().__init__(IterableWrapper(Places(self._asked)), depth=2)

    def next(self) -> Any:
        self._asked.set()
        return super().next()


MADE = {
    "nodes": lambda: data.Loader(
        data.Map(data.Shuffle(IterableWrapper(range(6)), 6, seed=1), draw, method="thread", name="draw")
    ),
    "shuffled": lambda: threaded(shuffle=True),
    "generator": lambda: threaded(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "torchdata": lambda: data.Loader(data.Prefetch(mixed(), depth=2)),
    "torchdata alone": lambda: data.Loader(mixed()),
}
FED = {
    "a state": lambda: data.Loader(IterableWrapper(Places())),
    "a state ahead": lambda: data.Loader(Asked()),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", MADE)
def test_a_loader_goes_back_before_its_first_batch(kind: str) -> None:
    random = torch.get_rng_state()
    with MADE[kind]() as loader:
        state = loader.state_dict()
        expected = [epoch(loader), epoch(loader)]
        assert expected[0] != expected[1]
        loader.load_state_dict(json.loads(json.dumps(state)))
        torch.set_rng_state(random)
        assert [epoch(loader), epoch(loader)] == expected


@pytest.mark.every_case
@pytest.mark.parametrize("kind", MADE | FED)
def test_behind_an_epoch_the_next_one_is_drawn_as_it_begins(kind: str) -> None:
    def train(loader: data.Loader) -> list[Any]:
        torch.manual_seed(2)
        found = []
        for _ in range(2):
            batches = iter(loader)
            found += [torch.rand(3).tolist(), epoch(batches)]
        return found

    make = (MADE | FED)[kind]
    with make() as loader:
        epoch(loader)
        state = loader.state_dict()
        expected = train(loader)
    with make() as loader:
        loader.load_state_dict(state)
        assert train(loader) == expected


def test_going_on_leaves_a_state_as_it_is() -> None:
    def make() -> data.Loader:
        return data.Loader(mixed())  # which goes on with a state that it is given

    with make() as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        before = digest(state)
        rest = [*batches]
    for _ in range(2):
        with make() as loader:
            loader.load_state_dict(state)
            assert [*loader] == rest
            assert digest(state) == before


def test_what_becomes_of_a_state_is_nothing_to_its_loader() -> None:
    with threaded() as loader:
        first, *rest = [digest(batch) for batch in loader]
        assert digest(next(iter(loader))) == first
        state = loader.state_dict()
        loader.load_state_dict(state)
        for _ in range(2):
            state["root"].clear()
            state = loader.state_dict()
        state["root"].clear()
        assert epoch(loader) == rest


def test_a_closed_loader_tells_what_it_has_done() -> None:
    with threaded() as loader:
        assert "fetch: not begun" in str(loader.report())
        epoch(loader)
    stage = loader.report().stages[0]
    assert stage.items is not None
    assert stage.workers is not None
    assert (stage.items.given, stage.items.ready, stage.workers.done, stage.workers.workers) == (5, 0, 5, 0)


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"foo": 1}, "no state of a loader in the format 2: it has the keys .'foo'"),
        (None, "this is a NoneType: give what the state_dict"),
        ([1], "this is a list"),
        ({"format": 1, "root": None}, "the keys .'format', 'root'"),
    ],
)
def test_a_state_of_something_else_is_refused(state: Any, said: str) -> None:
    with threaded() as loader, pytest.raises(InvalidArgument, match=said):
        loader.load_state_dict(state)


@pytest.mark.every_case
@pytest.mark.parametrize("changed", [{"device": "cpu"}, {"shuffle": True, "generator": torch.Generator()}])
def test_a_state_of_other_arguments_is_refused(changed: dict[str, Any]) -> None:
    for first, second in (({}, changed), (changed, {})):
        with threaded(**first) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with threaded(**second) as loader, pytest.raises(InvalidArgument, match=r"its nodes are \[.*are \['Keys"):
            loader.load_state_dict(state)


@pytest.mark.every_case
@pytest.mark.parametrize("key", ["skip", "source"])
def test_a_state_that_its_nodes_cannot_take_is_refused(key: str) -> None:
    def make(samples: int) -> data.Loader:
        return data.from_dataset(functions.Stream(samples), 2, num_workers=1, method="thread")

    with make(80) as loader:
        given = iter(loader)
        for _ in range(20):
            next(given)
        state = loader.state_dict()
    if key == "skip":
        state["root"]["skip"] = "many"
    with make(80 if key == "skip" else 20) as loader:
        loader.load_state_dict(state)
        with pytest.raises(InvalidArgument, match=r"cannot go on from its state: ValueError: .*: make its pipeline"):
            iter(loader)


def test_a_state_of_another_loader_is_refused() -> None:
    with data.from_dataset(functions.Rows(9), 3, method="thread") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with data.from_dataset(functions.Rows(9), 4, method="thread") as loader:
        loader.load_state_dict(state)
        with pytest.raises(InvalidArgument, match=r"had .*'batch_size': 3,.* has .*'batch_size': 4,"):
            iter(loader)
    with (
        data.Loader(data.Prefetch(IterableWrapper(range(3)), depth=1)) as other,
        pytest.raises(InvalidArgument, match=r"its nodes are \['Keys', 'Map'\], and this loader's are \['Prefetch'\]"),
    ):
        other.load_state_dict(state)
