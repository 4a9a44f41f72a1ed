"""Parts of a pipeline by themselves: seeds of places, what travels between processes, orders, pools of threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from hydra_ext import data
from hydra_ext.data import places
from hydra_ext.data.places import Place
from hydra_ext.data.workers import contents
from hydra_ext.data.workers.pool import Made, Outcome, Pool, Raised, Task
from hydra_ext.errors import InvalidArgument, StateError
from support.data.batches import digest

# ---- places ---------------------------------------------------------------------------------------------------------


def drawn() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


def test_all_generators_begin_with_the_seed_of_the_place() -> None:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    found = []
    for place in (Place(1, 2, 3), Place(1, 2, 4), Place(1, 3, 3), Place(2, 2, 3), Place(1, 2, "3x"), Place(1, 2, 3)):
        with places.at(place, seeded=True):
            own = data.generator(), data.numpy_generator()
            found.append((drawn(), torch.rand(2, generator=own[0]).tolist(), own[1].random()))
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    assert found[0] == found[-1]
    for part in range(3):
        assert len({repr(each[part]) for each in found}) == 5


def test_threads_leave_the_generators_alone() -> None:
    before = torch.get_rng_state()
    with places.at(Place(1, 2, 3), seeded=False):
        data.generator()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(LookupError, match="no sample is made now"):
        data.generator()


# ---- contents -------------------------------------------------------------------------------------------------------

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 60), max_size=3))
    dtype = draw(st.sampled_from(_DTYPES))
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    if made.dim() > 1 and draw(st.booleans()):
        made = made.transpose(0, 1)
    return made[::2] if made.dim() and draw(st.booleans()) else made


def arrays() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda size, dtype, step: numpy.arange(size).astype(dtype)[::step],
        st.integers(0, 3000),
        st.sampled_from(["float64", "int16", "U3", "datetime64[s]"]),
        st.sampled_from([1, -1, 3]),
    )


VALUES = st.recursive(
    st.one_of(tensors(), arrays(), st.integers(), st.text(max_size=9), st.none(), st.binary(max_size=9)),
    lambda each: st.one_of(
        st.lists(each, max_size=3), st.tuples(each, each), st.dictionaries(st.text(max_size=3), each, max_size=3)
    ),
    max_leaves=6,
)


@given(value=VALUES)
def test_what_travels_arrives_bit_for_bit(value: Any) -> None:
    assert digest(contents.loaded(contents.whole(value))) == digest(value)
    small, buffers = contents.dumped(value)
    begins, size = contents.offsets([each.nbytes for each in buffers])
    memory = bytearray(size)
    for begin, buffer in zip(begins, buffers, strict=True):
        assert begin % 64 == 0
        memory[begin : begin + buffer.nbytes] = buffer
    placed = [memoryview(memory)[begin : begin + each.nbytes] for begin, each in zip(begins, buffers, strict=True)]
    assert digest(contents.loaded(small, placed)) == digest(value)


def test_large_memory_lies_beside_the_rest_and_is_not_copied() -> None:
    value = {"tensor": torch.zeros(4096), "array": numpy.zeros(4096), "small": torch.zeros(4)}
    small, buffers = contents.dumped(value)
    assert len(small) < 1500
    assert [each.nbytes for each in buffers] == [4096 * 4, 4096 * 8]
    value["tensor"][0] = 7
    assert bytes(buffers[0][:4]) == numpy.float32(7).tobytes()


def test_tensors_lie_as_they_lay() -> None:
    value = torch.zeros(2, 3, 32, 32).to(memory_format=torch.channels_last)
    found = contents.loaded(contents.whole([value, value.transpose(1, 2)]))
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1].stride() == value.transpose(1, 2).stride()
    assert len(contents.whole(torch.zeros(1).expand(5000, 1000))) < 2000


def test_tensors_that_are_more_than_their_memory_keep_it() -> None:
    leaf = torch.ones(2000, requires_grad=True)
    found = contents.loaded(contents.whole([leaf, torch.ones(3).to_sparse(), torch.nn.Parameter(torch.ones(3))]))
    assert found[0].requires_grad
    assert found[1].is_sparse
    assert type(found[2]) is torch.nn.Parameter


# ---- orders ---------------------------------------------------------------------------------------------------------


def test_windows_are_shuffled_by_themselves() -> None:
    items = list(data.Shuffle(IterableWrapper(range(30)), 10, seed=1))
    assert [sorted(items[begin : begin + 10]) for begin in (0, 10, 20)] == [
        list(range(begin, begin + 10)) for begin in (0, 10, 20)
    ]
    assert items != sorted(items)
    assert items == list(data.Shuffle(IterableWrapper(range(30)), 10, seed=1))
    assert items != list(data.Shuffle(IterableWrapper(range(30)), 10, seed=2))


def test_a_last_batch_may_be_left_out() -> None:
    assert list(data.Batch(IterableWrapper(range(5)), 2)) == [[0, 1], [2, 3], [4]]
    assert list(data.Batch(IterableWrapper(range(5)), 2, drop_last=True)) == [[0, 1], [2, 3]]
    with pytest.raises(InvalidArgument, match="size=0"):
        data.Batch(IterableWrapper(range(5)), 0)


def test_a_node_takes_no_more_than_its_depth_ahead() -> None:
    taken: list[int] = []
    more = threading.Semaphore(0)

    class Source:
        def __iter__(self) -> Any:
            for item in range(100):
                taken.append(item)
                more.release()
                yield item

    def take(items: int) -> None:
        for _ in range(items):
            assert more.acquire(timeout=20)

    node = data.Prefetch(IterableWrapper(Source()), depth=3)
    assert next(node) == 0
    take(4)
    node.depth = 5
    take(2)
    assert next(node) == 1
    take(1)
    assert taken == list(range(7))
    assert not more.acquire(blocking=False)
    node.stop()
    with pytest.raises(StateError, match="was stopped"):
        next(node)
    node.reset()
    assert next(node) == 0
    node.stop()


# ---- pools ----------------------------------------------------------------------------------------------------------


class Doubles:
    def __init__(self, closed: list[int]) -> None:
        self._closed = closed

    def call(self, task: Task, is_next: Callable[[], bool]) -> Made:
        if task.item < 0:
            raise ValueError("negative")
        return Made(2 * task.item, 0.0)

    def close(self) -> None:
        self._closed.append(1)


def test_every_task_has_an_outcome_while_workers_come_and_go() -> None:
    outcomes: dict[int, Outcome] = {}
    closed: list[int] = []
    changed = threading.Condition()

    def tell(task: Task, outcome: list[Outcome]) -> None:
        with changed:
            outcomes[task.number] = outcome.pop()
            changed.notify()

    pool = Pool("double", lambda: Doubles(closed), tell, lambda task: True, workers=2)
    draws = random.Random(1)
    for number in range(400):
        pool.put(Task(1, number, Place(0, 0, number), number - 1))
        pool.resize(draws.randint(1, 5))
    with changed:
        assert changed.wait_for(lambda: len(outcomes) == 400, timeout=60)
    first = outcomes.pop(0)
    assert isinstance(first, Raised)
    assert [each.value for _, each in sorted(outcomes.items()) if isinstance(each, Made)] == list(range(0, 798, 2))
    figures = pool.figures()
    assert (figures.busy, figures.waiting, figures.done) == (0, 0, 400)
    pool.close()
    assert pool.figures().workers == 0
    assert closed
