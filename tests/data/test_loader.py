"""Batches are the same whatever the number of workers, and go on where a state was taken."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, WeightedRandomSampler
from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler

from hydra_ext import data
from hydra_ext.errors import InvalidArgument, StageFailed, StateError
from support.data import functions
from support.data.batches import digest

SAMPLES = 37


def epoch(loader: Any) -> list[str]:
    return [digest(batch) for batch in loader]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Two epochs of one worker."""
    torch.manual_seed(5)
    with data.from_dataset(functions.Drawn(SAMPLES), 4, shuffle=True) as loader:
        return epoch(loader) + epoch(loader)


# ---- beside DataLoader ----------------------------------------------------------------------------------------------


def orders() -> dict[str, Any]:
    weights = torch.arange(1, SAMPLES + 1, dtype=torch.float64)
    return {
        "sequential": lambda: {"batch_size": 4},
        "last left out": lambda: {"batch_size": 4, "drop_last": True},
        "shuffled": lambda: {"batch_size": 4, "shuffle": True},
        "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "sampler": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler(weights, 50)},
        "batch sampler": lambda: {
            "batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), batch_size=7, drop_last=True)
        },
        "single": lambda: {"batch_size": None, "sampler": SequentialSampler(range(SAMPLES))},
        "collated": lambda: {"batch_size": 4, "collate_fn": functions.same},
    }


@pytest.mark.every_case
@pytest.mark.parametrize("order", orders())
def test_two_epochs_are_those_of_a_data_loader(order: str) -> None:
    found = []
    for make in (DataLoader, data.from_dataset):
        torch.manual_seed(11)
        arguments = orders()[order]()
        loader = make(functions.Rows(SAMPLES), **arguments)
        length = len(loader)
        batches = [epoch(loader), epoch(loader)]
        found.append((length, batches, torch.rand(4).tolist()))
        assert {len(each) for each in batches} == {length}
        if isinstance(loader, data.Loader):
            loader.close()
    assert found[0] == found[1]


def test_an_iterable_dataset_is_iterated() -> None:
    expected = [batch.tolist() for batch in DataLoader(functions.Stream(10), batch_size=4)]
    with data.from_dataset(functions.Stream(10), 4, num_workers=2) as loader:
        assert [batch.tolist() for batch in loader] == expected == [batch.tolist() for batch in loader]
        with pytest.raises(TypeError, match="no len"):
            len(loader)


# ---- any number of workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 5])
def test_the_number_of_workers_changes_nothing(expected: list[str], workers: int) -> None:
    torch.manual_seed(5)
    with data.from_dataset(functions.Drawn(SAMPLES), 4, shuffle=True, num_workers=workers) as loader:
        assert epoch(loader) + epoch(loader) == expected


def test_workers_that_come_and_go_change_nothing(expected: list[str]) -> None:
    torch.manual_seed(5)
    draws = random.Random(2)
    found, seen = [], set()
    with data.from_dataset(functions.Drawn(SAMPLES), 4, shuffle=True) as loader:
        stage = loader.stages["fetch"]
        for _ in range(2):
            for batch in loader:
                found.append(digest(batch))
                stage.workers = draws.randint(1, 4)
                seen.add(stage.workers)
    assert found == expected
    assert len(seen) > 2


def test_random_numbers_of_a_sample_follow_from_its_key() -> None:
    """Not from its batch, nor from its place in it."""
    found = []
    for size in (1, 5):
        torch.manual_seed(5)
        with data.from_dataset(functions.Drawn(10), size, collate_fn=functions.same) as loader:
            found.append([digest(sample) for batch in loader for sample in batch])
    assert found[0] == found[1]
    assert len(set(found[0])) == 10


def test_each_epoch_has_random_numbers_of_its_own() -> None:
    with data.from_dataset(functions.Drawn(10), 2) as loader:
        assert not set(epoch(loader)) & set(epoch(loader))


def test_a_dataset_that_makes_batches_makes_them_in_workers() -> None:
    torch.manual_seed(3)
    with data.from_dataset(functions.Many(10), 4, map=functions.with_noise) as loader:
        first = list(loader)
    assert torch.cat([batch["sample"]["index"] for batch in first]).tolist() == list(range(10))
    torch.manual_seed(3)
    with data.from_dataset(functions.Many(10), 4, map=functions.with_noise, num_workers=3) as loader:
        assert epoch(loader) == [digest(batch) for batch in first]


def test_threads_make_the_same_batches() -> None:
    with data.from_dataset(functions.Rows(10), 4, method="thread", num_workers=3) as loader:
        assert epoch(loader) == [digest(batch) for batch in DataLoader(functions.Rows(10), batch_size=4)]


# ---- states ---------------------------------------------------------------------------------------------------------


def numbers(window: int, seed: int) -> data.Loader:
    """Each kind of node."""
    node: Any = IterableWrapper(range(50))
    node = data.Shuffle(node, window, seed=seed)
    node = data.Map(node, functions.with_noise, workers=2, name="noise", method="thread")
    node = data.Batch(node, 3)
    node = data.Map(node, functions.same, workers=3, name="same", method="thread")
    return data.Loader(data.Prefetch(node, depth=2))


def samples(loader: Any) -> Iterator[list[Any]]:
    for batch in loader:
        yield [each["sample"] for each in batch]


@settings(deadline=None, max_examples=15)
@given(taken=st.integers(0, 17), window=st.sampled_from([1, 7, 64]))
def test_a_state_of_any_batch_goes_on_with_the_next_one(taken: int, window: int) -> None:
    with numbers(window, 4) as loader:
        whole = list(samples(loader))
        second = list(samples(loader))
    assert sorted(itertools.chain(*whole)) == list(range(50))
    assert (whole == second) == (window == 1)
    with numbers(window, 4) as loader:
        iterator = samples(loader)
        begun = [next(iterator) for _ in range(taken)]
        state = loader.state_dict()
    assert begun == whole[:taken]
    with numbers(window, 4) as loader:
        loader.load_state_dict(state)
        rest = list(samples(loader))
        if taken < 17:
            assert rest == whole[taken:]
            assert list(samples(loader)) == second
        else:
            assert rest == second


@pytest.mark.parametrize("order", ["shuffled", "generator", "sampler", "batch sampler", "single"])
def test_processes_go_on_at_every_batch_of_an_epoch(order: str) -> None:
    def make() -> data.Loader:
        return data.from_dataset(functions.Drawn(SAMPLES), num_workers=2, **orders()[order]())

    torch.manual_seed(9)
    states = []
    with make() as loader:
        whole = []
        states.append(loader.state_dict())
        for batch in loader:
            whole.append(digest(batch))
            states.append(loader.state_dict())
    saved = json.loads(json.dumps(states))
    torch.manual_seed(1)  # a state brings its own seeds
    with make() as loader:
        for taken in range(1, len(whole)):
            loader.load_state_dict(saved[taken])
            assert epoch(loader) == whole[taken:]


def test_a_state_is_that_of_the_batch_last_given_however_many_wait() -> None:
    with data.from_dataset(functions.Rows(12), 1, num_workers=3, prefetch_factor=4) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
    with data.from_dataset(functions.Rows(12), 1) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert [int(batch["array"][0, 0]) for batch in loader] == list(range(3, 12))


def test_a_state_before_an_item_that_fails_goes_on_to_the_epochs_end() -> None:
    def make() -> data.Loader:
        return data.Loader(data.Map(IterableWrapper(range(4)), functions.raises, method="thread", name="raises"))

    with make() as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        with pytest.raises(StageFailed, match="sample 3"):
            next(iterator)
        assert list(iterator) == []


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["batch", "shuffle"])
def test_items_before_one_that_fails_are_not_lost(kind: str) -> None:
    def make() -> data.Loader:
        node: Any = data.Map(IterableWrapper(range(13)), functions.raises, method="thread", name="raises")
        node = data.Batch(node, 4) if kind == "batch" else data.Shuffle(node, 6, seed=1)
        return data.Loader(data.Prefetch(node, depth=2))

    def outcomes(iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield next(iterator)
            except StageFailed as error:
                yield f"failed {error.number}"
            except StopIteration:
                return

    with make() as loader:
        states, whole = [], []
        for each in outcomes(iter(loader)):
            whole.append(each)
            states.append(loader.state_dict())
    made = [each for each in whole if not isinstance(each, str)]
    items = sorted(itertools.chain(*made)) if kind == "batch" else sorted(made)
    assert items == [item for item in range(13) if item % 5 < 3]
    assert len(whole) - len(made) == 4
    with make() as loader:
        for taken, state in enumerate(states[:-1], 1):
            loader.load_state_dict(state)
            assert list(outcomes(iter(loader))) == whole[taken:]


def test_a_source_may_go_on_with_its_own_state() -> None:
    class Counts:
        def __init__(self) -> None:
            self._state = {"next": 0}

        def __iter__(self) -> Iterator[int]:
            while self._state["next"] < 30:
                self._state["next"] += 1
                yield self._state["next"] - 1

        def state_dict(self) -> dict[str, int]:
            return self._state

        def load_state_dict(self, state: dict[str, int]) -> None:
            self._state = dict(state)

    def make() -> data.Loader:
        return data.Loader(data.Map(IterableWrapper(Counts()), functions.same, method="thread", workers=4))

    with make() as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert list(loader) == list(range(3, 30))


def test_a_closed_loader_still_has_its_state() -> None:
    with data.from_dataset(functions.Rows(6), 2, method="thread") as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert loader.state_dict() == state


# ---- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_collating_draws_by_the_epochs_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        for dataset in (functions.Stream(4), range(4)):
            torch.manual_seed(seed)
            with data.from_dataset(dataset, 2, collate_fn=functions.with_noise) as loader:
                found.append(epoch(loader))
    assert found[:2] == found[2:4]
    assert not {*found[0], *found[1]} & {*found[4], *found[5]}


def test_stages_draw_numbers_of_their_own() -> None:
    node: Any = data.Map(IterableWrapper(range(3)), functions.with_noise, name="first")
    with data.Loader(data.Map(node, functions.with_noise, name="second")) as loader:
        for item in loader:
            assert not torch.equal(item["noise"], item["sample"]["noise"])


def test_samples_of_a_subset_draw_by_their_key() -> None:
    found = []
    for size in (1, 3):
        torch.manual_seed(5)
        subset = Subset(functions.Drawn(10), [1, 4, 5])
        with data.from_dataset(subset, size, collate_fn=functions.same) as loader:
            found.append([digest(sample) for batch in loader for sample in batch])
    assert found[0] == found[1]


def test_what_a_dataset_makes_of_a_batch_is_collated_as_it_is() -> None:
    with data.from_dataset(functions.Columns(4), 2, collate_fn=functions.same) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_batch_sampler_may_use_one_list_again() -> None:
    class Again:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[list[int]]:
            batch: list[int] = []
            for keys in ([0, 1], [2, 3]):
                batch[:] = keys
                yield batch

    with data.from_dataset(functions.Rows(4), batch_sampler=Again(), method="thread") as loader:
        assert [batch["array"][:, 0].tolist() for batch in loader] == [[0, 1], [2, 3]]


# ---- wrong use ------------------------------------------------------------------------------------------------------


def test_an_iteration_ends_when_another_begins() -> None:
    with data.from_dataset(functions.Rows(9), 2, method="thread") as loader:
        first = iter(loader)
        next(first)
        assert len(list(loader)) == 5
        with pytest.raises(StateError, match="another one"):
            next(first)
    with pytest.raises(StateError, match="closed"):
        iter(loader)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 0}, "batch_size=0: give a whole number from 1 on"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"prefetch_factor": True}, "prefetch_factor=True"),
        ({"shuffle": True, "sampler": [1]}, "leave shuffle= out"),
        ({"batch_size": None, "drop_last": True}, "drop_last= is for batches"),
        ({"batch_size": 4, "batch_sampler": [[1]]}, "batch_sampler= stands for"),
        ({"sampler": iter([1])}, "has no length"),
        ({"method": "fork"}, "method='fork'"),
    ],
)
def test_arguments_that_exclude_one_another_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        data.from_dataset(functions.Rows(3), **arguments)


def test_an_iterable_dataset_has_its_own_order() -> None:
    with pytest.raises(InvalidArgument, match="its own order"):
        data.from_dataset(functions.Stream(3), shuffle=True)


def test_nodes_below_a_sampler_of_several_are_found() -> None:
    maps: dict[str, Any] = {
        name: data.Map(IterableWrapper(range(5)), functions.same, method="thread", name=name) for name in ("one", "two")
    }
    node: Any = MultiNodeWeightedSampler(maps, {"one": 1.0, "two": 1.0}, seed=1)
    with data.Loader(node) as loader:
        assert set(loader.stages) == {"one", "two"}
        next(iter(loader))
    assert all(each.worker_figures() is None for each in maps.values())


def test_stages_have_names_of_their_own() -> None:
    node: Any = data.Map(IterableWrapper(range(3)), functions.same, name="one")
    with pytest.raises(InvalidArgument, match="same name"):
        data.Loader(data.Map(node, functions.same, name="one"))
