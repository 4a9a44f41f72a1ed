"""States of sources and nodes: what they hold, and what happens where they meet other data or other arguments."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from torchdata.nodes import IterableWrapper

from hydra_ext import data
from hydra_ext.errors import InvalidArgument
from support.data import functions

# ---- keys -----------------------------------------------------------------------------------------------------------


class Listed:
    """A sampler, or batch sampler, of given keys."""

    def __init__(self, keys: Iterable[Any]) -> None:
        self._keys = list(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)


KEYS: dict[str, Callable[[], dict[str, Any]]] = {
    "numbers": lambda: {"sampler": Listed([3, 0, 2, 1])},
    "numbers of numpy": lambda: {"sampler": numpy.arange(4)},
    "large numbers": lambda: {"sampler": Listed([2**70, 1, 2, 3])},
    "tuples": lambda: {"batch_size": None, "sampler": Listed([(numpy.int64(i), "a") for i in range(4)])},
    "lists": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(7)), 3, drop_last=False)},
    "arrays": lambda: {"batch_sampler": Listed(numpy.array_split(numpy.arange(7), 3))},
    "ranges": lambda: {"batch_sampler": Listed([range(3), range(3, 5), range(0)])},
    "random": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
}


class Echo:
    """Gives the key."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, key: Any) -> Any:
        return key


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KEYS)
def test_a_state_with_any_keys_goes_on(kind: str) -> None:
    def made() -> data.Loader:
        return data.from_dataset(Echo(), collate_fn=functions.same, method="thread", num_workers=1, **KEYS[kind]())

    with made() as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [*batches, *loader]
    with made() as loader:
        # A checkpoint keeps tuples, which JSON does not.
        loader.load_state_dict(state if kind == "tuples" else json.loads(json.dumps(state)))
        assert [*loader, *loader] == rest


def objects(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(objects, value.values()))
    return 1 + sum(map(objects, value)) if isinstance(value, list) else 1


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["numbers", "lists", "random"])
def test_a_state_of_many_keys_has_few_objects(kind: str) -> None:
    """It is copied every sixteen batches, beside the training."""
    few: dict[str, Any] = {
        "numbers": {"batch_size": 50, "sampler": Listed(range(10_000))},
        "lists": {"batch_sampler": BatchSampler(SequentialSampler(range(10_000)), 50, drop_last=False)},
        "random": {"batch_size": 50, "shuffle": True, "generator": torch.Generator()},
    }
    with data.from_dataset(range(10_000), method="thread", num_workers=1, **few[kind]) as loader:
        next(iter(loader))
        assert objects(loader.state_dict()) < 50


# ---- other data -----------------------------------------------------------------------------------------------------


class Shards(IterableDataset[int]):
    """So many samples; one of them cannot be read."""

    def __init__(self, samples: int, bad: int | None = None) -> None:
        self._samples = samples
        self._bad = bad

    def __iter__(self) -> Iterator[int]:
        for index in range(self._samples):
            if index == self._bad:
                raise OSError("shard 3 cannot be read")
            yield index


def streamed(dataset: Shards, **options: Any) -> data.Loader:
    return data.from_dataset(dataset, **{"batch_size": 4, "method": "thread", "num_workers": 1, **options})


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("shards", "error", "said"),
    [(Shards(40, 5), OSError, "shard 3"), (Shards(12), InvalidArgument, "behind 6 items.*ended after 3")],
)
def test_a_source_that_fails_before_the_state_is_told(shards: Shards, error: type[Exception], said: str) -> None:
    with streamed(Shards(40)) as loader:
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        state = loader.state_dict()
    with streamed(shards) as loader:
        loader.load_state_dict(state)
        found: list[BaseException] = []

        def take() -> None:
            try:
                next(iter(loader))
            except Exception as raised:  # noqa: BLE001 - looked at below
                found.append(raised)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        with pytest.raises(error, match=said):
            raise found[0]


# ---- other arguments ------------------------------------------------------------------------------------------------


def pipelines() -> dict[str, tuple[Callable[[], data.Loader], Callable[[], data.Loader]]]:
    def batched(size: int, *, drop_last: bool = False) -> data.Loader:
        return data.Loader(data.Batch(IterableWrapper(range(40)), size, drop_last=drop_last))

    def shuffled(window: int, seed: int = 0) -> data.Loader:
        return data.Loader(data.Shuffle(IterableWrapper(range(40)), window, seed=seed))

    def keyed(**options: Any) -> data.Loader:
        return data.from_dataset(range(40), 4, method="thread", num_workers=1, **options)

    return {
        "batch_size of a stream": (lambda: streamed(Shards(40)), lambda: streamed(Shards(40), batch_size=2)),
        "drop_last of a stream": (lambda: streamed(Shards(40)), lambda: streamed(Shards(40), drop_last=True)),
        "size": (lambda: batched(4), lambda: batched(5)),
        "drop_last": (lambda: batched(4), lambda: batched(4, drop_last=True)),
        "window": (lambda: shuffled(8), lambda: shuffled(9)),
        "seed": (lambda: shuffled(8), lambda: shuffled(8, 1)),
        "order": (lambda: keyed(shuffle=True), keyed),
    }


@pytest.mark.every_case
@pytest.mark.parametrize("what", pipelines())
def test_a_state_taken_with_other_arguments_is_refused(what: str) -> None:
    before, after = pipelines()[what]
    with before() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with after() as loader:
        loader.load_state_dict(state)
        with pytest.raises(InvalidArgument, match=f"it had .*'{what.split()[0]}': .*, and this one has"):
            next(iter(loader))
