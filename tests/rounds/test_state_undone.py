"""What modules hold is after a round that was undone, or recomputed, what it would be after a loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_ext.runtime.rounds.undoing.module_contents import ModuleContents
from hydra_ext.runtime.step_planner import StepPlanner
from support.rounds.undone import (
    FAILURES,
    MICROBATCHES,
    STEPS,
    WIDTH,
    Failure,
    Layer,
    Stack,
    assert_is_the_loop,
    squared,
)


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


# ---- one microbatch after the other ---------------------------------------------------------------------------------


class DrawsLater(Layer):
    """From the second step on; then rounds of several microbatches are refused."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not self.draws or random.random() > 0.3 else x


def draws_later(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.draws = bool(x[0, 0] > 0)
    return squared(model, x)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [2, 3, 4])
def test_microbatches_that_run_alone_are_undone_alone(where: str, call: int) -> None:
    report = assert_is_the_loop(lambda: Stack(DrawsLater), Failure(where, 2, 1, call), loss=draws_later)
    assert (report.refusals, report.fallbacks > 0) == (1, True)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [2, 3, 4])
def test_by_default_they_are_undone_too(where: str, call: int) -> None:
    failure = Failure(where, 2, 1, call)
    report = assert_is_the_loop(lambda: Stack(DrawsLater), failure, loss=draws_later, activations="auto")
    assert report.retries >= 1


class Remembers(Layer):
    """Counts in a buffer, a number and a list, which its output shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.count = 0
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.count += 1
        self.seen.append(x[0, 1].item())
        return super().forward(x) + self.mean / self.count + sum(self.seen) / 100


class Advances(Layer):
    """Holds an iterator of which there is no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(self.numbers) / 1000


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of notes that were made of modules. All plans are for rounds of one microbatch."""
    found, note, plan = [0], ModuleContents.of, StepPlanner.plan

    def counted(*args: Any) -> ModuleContents:
        found[0] += 1
        return note(*args)

    monkeypatch.setattr(ModuleContents, "of", counted)
    monkeypatch.setattr(StepPlanner, "plan", lambda planner, count, _, **given: plan(planner, count, [1], **given))
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [2, 3, 4])
def test_later_microbatches_are_undone_with_the_first_ones_notes(where: str, call: int, notes: list[int]) -> None:
    assert_is_the_loop(lambda: Stack(Remembers), Failure(where, call=call), activations="auto")
    assert notes == [STEPS]


def test_what_cannot_be_put_back_is_noted_before_each_microbatch(notes: list[int]) -> None:
    assert_is_the_loop(lambda: Stack(Advances), activations="auto")
    assert notes == [STEPS * MICROBATCHES]


# ---- generators of a module's own -----------------------------------------------------------------------------------

GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "python": lambda: random.Random(5),
    "numpy": lambda: np.random.default_rng(5),
}


class Noisy(Layer):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        generator = self.held[0] if isinstance(self.held, (list, tuple)) else self.held
        of_torch = isinstance(generator, torch.Generator)
        return super().forward(x + (torch.rand((), generator=generator) if of_torch else generator.random()))


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda it: it, id="alone"),
        pytest.param(lambda it: (it,), id="tuple"),
        pytest.param(lambda it: [it], id="list", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_generators_of_modules_are_put_back(
    generator: Callable[[], Any], held: Callable[[Any], Any], recompute: bool, failure: Failure | None
) -> None:
    assert_is_the_loop(lambda: Stack(lambda: Noisy(held(generator()))), failure, recompute=recompute)


# ---- tensors and containers -----------------------------------------------------------------------------------------


class Moments(NamedTuple):
    sums: Tensor
    sizes: list[int]


class Expanded(Layer):
    """The same memory in many places, which nothing can be written to."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        scale = torch.full((1,), 1.1).expand(WIDTH)
        if buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Records(Layer):
    """What it writes to in place, it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)
        self.history: list[float] = []
        self.notes: dict[str, Any] = {"sums": [torch.zeros(())], "sizes": set()}
        self.moments = Moments(torch.zeros(WIDTH), [])

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        found = y.detach()
        self.total += found.sum(0)
        self.history.append(float(found.mean()))
        self.notes["sums"][0] += found.sum()
        self.notes["sizes"].add(len(self.history))
        self.moments.sums.add_(found.sum(0))
        self.moments.sizes.append(len(x))
        return y

    def recorded(self) -> list[Any]:
        notes = self.notes["sums"][0].item(), self.notes["sizes"]
        return [self.total.tolist(), list(self.history), notes, self.moments.sums.tolist(), self.moments.sizes]


class Reads(Records):
    """What the calls before have left."""

    def forward(self, x: Tensor) -> Tensor:
        read = self.total + self.moments.sums.mean() + self.notes["sums"][0] + len(self.history)
        return super().forward(x * (1 + read / 100))


class Sparse(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacent", torch.eye(WIDTH).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.adjacent, x.t()).t())


class InPlace(Layer):
    """Backward needs the buffer itself as it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.total.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x * self.total)


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "layer",
    [lambda: Expanded(buffer=False), lambda: Expanded(buffer=True), Records, Reads, Sparse],
    ids=["expanded", "expanded buffer", "records", "reads", "sparse"],
)
def test_tensors_and_containers_are_as_in_a_loop(
    layer: Callable[[], Layer], recompute: bool, failure: Failure | None
) -> None:
    def recorded(model: Stack) -> list[Any]:
        return [each.recorded() for each in model.layers if isinstance(each, Records)]

    report = assert_is_the_loop(lambda: Stack(layer), failure, extra=recorded, recompute=recompute)
    assert report.fallbacks == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", [False, True, None])
def test_a_buffer_that_backward_needs_as_it_was_is_written_to_by_later_microbatches(recompute: bool | None) -> None:
    report = assert_is_the_loop(lambda: Stack(InPlace), recompute=recompute)
    assert report.refusals == (not recompute)


class Large(DrawsLater):
    """A tensor that is not copied each time."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.zeros(2**18 + 1)

    def forward(self, x: Tensor) -> Tensor:
        self.large[: len(x)] += x.detach().mean(1)
        return super().forward(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_large_tensor_is_written_to_once(recompute: bool) -> None:
    def large(model: Stack) -> list[float]:
        return [each.large.sum().item() for each in model.layers]

    assert_is_the_loop(lambda: Stack(Large), recompute=recompute, extra=large)


def test_a_round_that_is_refused_after_it_has_written_to_a_large_tensor_is_undone() -> None:
    def large(model: Stack) -> list[float]:
        return [each.large.sum().item() for each in model.layers]

    assert assert_is_the_loop(lambda: Stack(Large), loss=draws_later, extra=large).refusals == 1
