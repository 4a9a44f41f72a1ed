"""What modules hold in other ways than tensors and plain numbers is followed too, and left as it was."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.errors import SplitError
from hydra_ext.split import time_events
from support.split.split_models import Batch
from support.split.split_models_own import Layer, Stack, text, text_loss
from support.split.split_side_effects import AddsUp, both_ways, branching
from support.split.split_stages import SEED, Fn, assert_same, bound, cut, rehearsed, run, run_plainly
from support.split.stateful_models import COUNTERS, CountingLayer, CountsInLayer, in_attribute

BATCHES = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
SOURCES: dict[str, Callable[[], Any]] = {
    "random": lambda: random.Random(0),
    "generator": lambda: np.random.default_rng(0),
    "state": lambda: np.random.RandomState(0),
}


def cuts_of(model: nn.Module) -> list[int]:
    """Those that are possible. The first and the last of them give what the whole model gives."""
    expected = run_plainly(model, text_loss, BATCHES)
    rehearsal = rehearsed(model, text_loss, BATCHES[0])
    time_events(model, bound(text_loss, model), BATCHES[0], rehearsal, seed=SEED)
    found = rehearsal.possible_cuts
    for boundary in {*found[:1], *found[-1:]}:
        assert_same(run(model, text_loss, BATCHES, [boundary], rehearsal), expected)
    return found


def why(model: nn.Module, boundary: int) -> str:
    return "; ".join(rehearsed(model, text_loss, BATCHES[0]).boundaries[boundary].reasons)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- sources of random numbers --------------------------------------------------------------------------------------
def drawn(source: Any) -> float:
    number: float = source.random()
    return number


class Scaled(Layer):
    source: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * drawn(self.source)


class DropsLayers(Stack):
    """Draws between blocks, from the n-th on."""

    def __init__(self, source: Any, first: int) -> None:
        super().__init__()
        self.source, self.first = [source], first

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h) if i < self.first else layer(h) * drawn(self.source[0])
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("kind", SOURCES)
def test_blocks_may_have_sources_of_random_numbers_of_their_own(kind: str) -> None:
    model = Stack(Scaled)
    for layer in model.layers:
        layer.source = SOURCES[kind]()
    assert cuts_of(model) == [1, 2, 3, 4, 5]
    assert drawn(model.layers[0].source) == drawn(SOURCES[kind]())  # rehearsals and timing have left it


@pytest.mark.parametrize("kind", SOURCES)
def test_no_cut_between_blocks_that_draw_from_one_source(kind: str) -> None:
    model = Stack(Scaled)
    source = SOURCES[kind]()
    for layer in model.layers:
        layer.source = source
    assert cuts_of(model) == [1, 5]
    assert "drawn from layers.0.source on both sides of the cut" in why(model, 3)


@pytest.mark.parametrize("kind", SOURCES)
def test_no_cut_between_draws_of_glue_from_one_source(kind: str) -> None:
    assert cuts_of(DropsLayers(SOURCES[kind](), first=2)) == [1, 2, 3, 5]


def test_numpys_and_pythons_own_sources_may_be_held() -> None:
    model = Stack(Scaled)
    for i, layer in enumerate(model.layers):
        layer.source = (np.random.mtrand._rand, random._inst)[i % 2]  # type: ignore[attr-defined]
    assert rehearsed(model, text_loss, BATCHES[0]).possible_cuts == [1, 2, 3, 4, 5]


# ---- arrays, modules and objects ------------------------------------------------------------------------------------
def counts_in(holder: Any, count: Callable[[Any], float]) -> Stack:
    """All layers count there."""
    model = Stack(CountsInLayer)
    for layer in model.layers:
        layer.counter, layer.count = holder, count
    return model


HOLDERS = ("array", "module in a list", "slots", "dict with attributes")


@pytest.mark.parametrize("name", HOLDERS)
def test_no_cut_between_blocks_that_count_in_one_place(name: str) -> None:
    make, count = COUNTERS[name]
    holder = make()
    assert cuts_of(counts_in(holder, count)) == [1, 5]
    assert count(holder) == 1  # rehearsals and timing have left it


@pytest.mark.parametrize("name", HOLDERS)
def test_blocks_may_count_each_for_itself(name: str) -> None:
    make, count = COUNTERS[name]
    model = counts_in(None, count)
    for layer in model.layers:
        layer.counter = make()
    assert cuts_of(model) == [1, 2, 3, 4, 5]
    assert count(model.layers[2].counter) == 1


@pytest.fixture
def package(tmp_path: Any) -> Iterator[ModuleType]:
    """A package of the user's that is called like a module of Python's."""
    before = sys.modules.pop("code", None)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__init__.py").write_text("class Counter:\n    calls = 0\n")
    sys.path.insert(0, str(tmp_path))
    try:
        yield __import__("code")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["code"]
        if before is not None:
            sys.modules["code"] = before


def test_objects_of_a_package_called_like_one_of_pythons_are_the_users(package: Any) -> None:
    counter = package.Counter()
    assert cuts_of(counts_in(counter, in_attribute)) == [1, 5]
    assert counter.calls == 0


# ---- classes --------------------------------------------------------------------------------------------------------
class CountsTogether(Layer):
    calls = 0
    by_name: ClassVar[dict[str, int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        CountsTogether.calls += 1
        self.by_name["all"] = self.calls
        return x + self.branch(x) / (1 + self.calls)


class CountsAlone(Layer):
    """As the one layer of the model that does."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsAlone.calls += 1
        return x + self.branch(x) / self.calls


def test_no_cut_between_blocks_that_count_in_their_class() -> None:
    assert rehearsed(Stack(CountsTogether), text_loss, BATCHES[0]).possible_cuts == [1, 5]
    assert (CountsTogether.calls, CountsTogether.by_name) == (0, {})
    assert type(vars(CountsTogether)["calls"]) is int


def test_a_block_may_count_in_its_class() -> None:
    model = Stack()
    model.layers[1] = CountsAlone()
    assert rehearsed(model, text_loss, BATCHES[0]).possible_cuts == [1, 2, 3, 4, 5]
    assert CountsAlone.calls == 0


registry: dict[str, type] = {}


class Registered:
    def __init_subclass__(cls) -> None:
        registry[cls.__name__] = cls


class RegisteredCounter(Registered):
    def __init__(self) -> None:
        self.calls = 0


class RegisteredLayer(CountingLayer, Registered):
    pass


def test_a_rehearsal_makes_no_classes_that_a_registry_would_keep() -> None:
    assert cuts_of(counts_in(RegisteredCounter(), in_attribute)) == [1, 5]
    assert cuts_of(Stack(RegisteredLayer)) == [1, 2, 3, 4, 5]
    assert registry == {"RegisteredCounter": RegisteredCounter, "RegisteredLayer": RegisteredLayer}
    assert all("__getattribute__" not in vars(kind) for kind in registry.values())


# ---- microbatches and modes -----------------------------------------------------------------------------------------
def popped_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    target = batch.pop("y")
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), target.flatten())


def test_a_first_run_that_took_another_way_leaves_what_is_in_the_microbatch() -> None:
    model = branching(AddsUp)()
    expected = run_plainly(model, popped_loss, both_ways(4))
    rehearsal = rehearsed(model, popped_loss, both_ways(1)[0])
    assert_same(run(model, popped_loss, both_ways(4), [4], rehearsal), expected)


def distilled(model: nn.Module, batch: Batch) -> Tensor:
    """The first call is one of the model that does not train; the second is part of the same forward."""
    model.eval()
    with torch.no_grad():
        target = model(batch["x"])
    model.train()
    return F.mse_loss(model(batch["x"].roll(1, 1)), target)


def left_in_eval(model: nn.Module, batch: Batch) -> Tensor:
    loss = distilled(model, batch)
    model.eval()
    return loss


@pytest.mark.parametrize(("fn", "training"), [(distilled, True), (left_in_eval, False)])
def test_a_stage_that_ends_early_leaves_the_modes_as_the_whole_forward_would(fn: Fn, training: bool) -> None:
    model = Stack().train()
    stages = cut(model, fn, rehearsed(model, fn, BATCHES[0]), [3])
    assert model.training
    stages.forward(BATCHES[0])
    for part in stages.models:
        assert {module.training for module in part.modules()} == {training}


# ---- iterators ------------------------------------------------------------------------------------------------------
def counting() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def delegating() -> Iterator[int]:
    yield from counting()


ITERATORS: dict[str, Callable[[], Iterator[int]]] = {
    "count": lambda: itertools.count(1),
    "list": lambda: iter([1, 2, 3, 4, 5]),
    "generator": counting,
    "delegating": delegating,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_that_a_rehearsal_would_use_up_is_refused(name: str) -> None:
    model = counts_in(ITERATORS[name](), next)
    with pytest.raises(SplitError, match="microbatch, holds, and a rehearsal cannot move it back"):
        rehearsed(model, text_loss, BATCHES[0])


class Numbered(Layer):
    """Has an iterator that its forward leaves alone, and its class one that it does not."""

    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.names = iter(["a"])

    def forward(self, x: Tensor) -> Tensor:
        next(self.numbers)
        return x + self.branch(x)


def test_iterators_that_are_not_used_and_those_of_classes_do_not_matter() -> None:
    assert rehearsed(Stack(Numbered), text_loss, BATCHES[0]).possible_cuts == [1, 2, 3, 4, 5]


# ---- what the function can read past the model ----------------------------------------------------------------------
def reading(counter: Any, read: Callable[[Any], float], before: bool) -> Fn:
    def fn(model: nn.Module, batch: Batch) -> Tensor:
        scale = 1 + read(counter) if before else 0.0
        loss = text_loss(model, batch)
        return loss * (scale or 1 + read(counter))

    return fn


READ: dict[str, Callable[[Any], float]] = {
    "array": lambda held: float(held[0]),
    "slots": lambda held: float(held.calls),
}


@pytest.mark.every_case
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("name", "late"), [("array", []), ("slots", [1, 2])])
def test_what_a_block_counts_and_the_function_reads_past_it_is_refused(
    name: str, late: list[int], before: bool
) -> None:
    make, count = COUNTERS[name]
    model, counter = Stack(), make()
    model.layers[1] = CountsInLayer()
    model.layers[1].counter, model.layers[1].count = counter, count
    fn = reading(counter, READ[name], before)
    assert rehearsed(model, fn, BATCHES[0]).possible_cuts == ([] if before else late)
    assert rehearsed(model, text_loss, BATCHES[0]).possible_cuts == [1, 2, 3, 4, 5]
