"""State that several modules hold, that is read elsewhere, or that is carried on: rounds are as the loop."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ext.errors import UnsupportedModel
from hydra_ext.runtime.rounds.undoing.accesses import Accesses
from support.rounds.undone import WIDTH, Layer, Stack, assert_is_the_loop, batches, squared

BOTH: list[dict[str, Any]] = [{}, {"round_size": 4, "recompute": False}]


def gather(attribute: str) -> Callable[[Any], list[Any]]:
    def of(model: Stack) -> list[Any]:
        values = [getattr(layer, attribute) for layer in model.layers]
        return [value.tolist() if isinstance(value, Tensor) else value for value in values]

    return of


# ---- fn is called once for each microbatch --------------------------------------------------------------------------
class Notes(Stack):
    """Code around its layers writes to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.history.append(float(y.detach().mean()))
        return y


CALLS = [0]  # of fn's own: modules do not know of them


def counted(model: Any, x: Tensor) -> Tensor:
    CALLS[0] += 1
    calls = CALLS[0]
    return squared(model, x) * calls


def with_calls(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """They begin anew with each model."""

    def made() -> nn.Module:
        CALLS[0] = 0
        return make()

    return made


def test_a_first_forward_that_writes_around_layers_is_not_run_twice() -> None:
    report = assert_is_the_loop(with_calls(Notes), loss=counted, extra=lambda model: [*CALLS, model.history])
    assert (report.refusals, report.fallbacks, report.retries) == (0, 0, 0)


def test_a_round_that_has_to_be_run_twice_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hydra_ext"):
        assert_is_the_loop(Notes, again=1, round_size=4, recompute=False)
    told = [record for record in caplog.records if "calling fn for them again" in record.getMessage()]
    assert len(told) == 1


METER = [nn.Module()]  # of the user's, and no part of a model


class Metered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        METER[0].calls = getattr(METER[0], "calls", 0) + 1
        return super().forward(x)


def metered() -> nn.Module:
    METER[0] = nn.Module()
    return Stack(Metered)


def test_a_module_outside_the_model_is_the_users_own() -> None:
    """Layers count there; were it one of the model's, a round would be undone for it."""
    report = assert_is_the_loop(metered, extra=lambda _: [METER[0].calls], recompute=False)
    assert report.rounds > 0
    assert (report.refusals, report.fallbacks, report.retries) == (0, 0, 0)


# ---- what several modules hold --------------------------------------------------------------------------------------
class Statistics(Layer):
    """Running statistics that belong to all layers."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean, self.norm.running_var = norm.running_mean, norm.running_var

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(super().forward(x))
        return y


class Holds(Layer):
    """Writes to what it was given, and reads it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if isinstance(self.held, Tensor):
            self.held.mul_(0.9).add_(y.detach().mean(), alpha=0.1)
            return y * (1 + float(self.held.sum()))
        if isinstance(self.held, dict):
            self.held["mean"] = 0.9 * self.held["mean"] + 0.1 * float(y.detach().mean())
            return y * (1 + self.held["mean"])
        of_torch = isinstance(self.held, torch.Generator)
        return y * (torch.rand((), generator=self.held) if of_torch else self.held.random())


def together(make: Callable[[], Any], layer: Callable[[Any], Layer] = Holds) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        held = make()
        return Stack(lambda: layer(held))

    return made


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy's old ones": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
}
HELD: dict[str, Callable[[], nn.Module]] = {
    "statistics": together(lambda: nn.BatchNorm1d(WIDTH), Statistics),
    "tensor": together(lambda: torch.zeros(1)),
    "dictionary": together(lambda: {"mean": 0.5}),
    **{name: together(make) for name, make in GENERATORS.items()},
}


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_what_layers_share_is_read_and_written_as_in_a_loop(
    make: Callable[[], nn.Module], choices: dict[str, Any]
) -> None:
    assert assert_is_the_loop(make, **choices).fallbacks > 0


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_by_default_it_is_read_and_written_as_in_a_loop(make: Callable[[], nn.Module]) -> None:
    assert_is_the_loop(make, activations="auto")


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generators_of_each_layer_refuse_no_round(make: Callable[[], Any]) -> None:
    report = assert_is_the_loop(lambda: Stack(lambda: Holds(make())))
    assert (report.refusals, report.fallbacks) == (0, 0)


# ---- what is carried from one microbatch to the next ----------------------------------------------------------------
class Cell(nn.Module):
    """A recurrent state: read before the cell, set after it."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)
        self.held = held
        self.count = 0
        self.scale: Any = None
        self.pair = (torch.zeros(WIDTH), 0)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.held == "counter":
            y: Tensor = self.cell(x * (1 + self.count))
            self.count += 1
        elif self.held == "attribute":
            y = self.cell(x if self.scale is None else x * self.scale)
            self.scale = y.detach().mean(0)
        elif self.held == "tuple":
            y = self.cell(x + self.pair[0])
            self.pair = y.detach().mean(0), self.pair[1] + 1
        elif self.held == "buffer":
            y = self.cell(x + self.state)
            self.state = y.detach().mean(0)
        else:
            y = self.cell(x + self.state.clone())
            self.state.copy_(y.detach().mean(0))
        return y


class SitesInside(nn.Module):
    """Its blocks are inside of what carries the state."""

    def __init__(self, held: str) -> None:
        super().__init__()
        cells = Cell(held), Cell(held)
        self.layers = nn.ModuleList(cell.cell for cell in cells)
        self.outer = nn.ModuleList([nn.ModuleList(cells)])

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.outer[0]:
            x = cell(x)
        return x


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
@pytest.mark.parametrize("held", ["counter", "attribute", "tuple", "buffer", "in place"])
def test_what_is_read_before_a_block_and_written_after_it_goes_from_one_microbatch_to_the_next(
    held: str, choices: dict[str, Any]
) -> None:
    again = bool(choices) and held in ("buffer", "in place")  # it is not known yet that code around blocks writes
    report = assert_is_the_loop(lambda: SitesInside(held), again=again, extra=lambda m: m.outer[0][0].count, **choices)
    assert report.fallbacks > 0


# ---- what is read elsewhere -----------------------------------------------------------------------------------------
class Leaves(Layer):
    """What it has seen, for others to read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.notes: list[float] = []
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.copy_(y.detach().mean(0))
        self.notes.append(float(y.detach().mean()))
        self.last = y.detach().mean()
        return y


def after(read: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A loss that reads what the first layer has left."""
    return lambda model, x: squared(model, x) * (1 + read(model.layers[0]))


class ReadsBefore(Stack):
    """What its last layer has left in the microbatch before."""

    def __init__(self) -> None:
        super().__init__(Leaves)

    def forward(self, x: Tensor) -> Tensor:
        left = self.layers[-1].last
        return super().forward(x if left is None else x * left)


READS: dict[str, Callable[[Any], Any]] = {
    "buffer": lambda layer: layer.seen.mean(),
    "list": lambda layer: layer.notes[-1],
}


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_a_layer_has_left_is_read_after_it_as_in_a_loop(
    read: Callable[[Any], Any], choices: dict[str, Any]
) -> None:
    assert assert_is_the_loop(lambda: Stack(Leaves), loss=after(read), **choices).fallbacks > 0


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
def test_what_the_microbatch_before_has_set_is_read_as_in_a_loop(choices: dict[str, Any]) -> None:
    assert assert_is_the_loop(ReadsBefore, **choices).fallbacks > 0


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
def test_what_each_microbatch_reads_of_its_own_refuses_no_round(choices: dict[str, Any]) -> None:
    """Attributes are kept apart; of what is written in place nothing is read outside."""
    report = assert_is_the_loop(lambda: Stack(Leaves), loss=after(lambda layer: layer.last), **choices)
    assert (report.refusals, report.fallbacks) == (0, 0)


class Marks(Stack):
    """Some microbatches set an attribute that was not there, which others read."""

    def forward(self, x: Tensor) -> Tensor:
        marks = bool(x[0, 2] > 0)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0 and marks:
                self.mark = 0.5
            x = x * (1 + getattr(self, "mark", 0.0))
        out: Tensor = self.head(x)
        return out


def test_an_attribute_that_a_later_microbatch_sets_first_is_not_there_for_the_one_before() -> None:
    marks = [bool(x[0, 2] > 0) for x in batches()[0]]
    assert marks[1:3] == [False, True]  # together in a round, the first one being alone
    report = assert_is_the_loop(Marks, extra=lambda model: vars(model)["mark"], again=1)
    assert (report.refusals, report.fallbacks) == (0, 0)


class AddsUp(Stack):
    """Adds up in an object, which has nothing of it before the first microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.holder.total = getattr(self.holder, "total", 0.0) + float(x.detach().mean())
            x = x * (1 + self.holder.total / 10)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(("choices", "again"), [(BOTH[0], 0), (BOTH[1], 1)], ids=["chosen", "given"])
def test_what_comes_into_an_object_with_the_first_forward_is_as_in_a_loop(choices: dict[str, Any], again: int) -> None:
    report = assert_is_the_loop(AddsUp, extra=lambda model: model.holder.total, again=again, **choices)
    assert report.fallbacks > 0


class Takes(Layer):
    """Goes on in what cannot be set back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + next(self.numbers) / 100))


def test_a_round_that_has_to_be_run_twice_and_cannot_be_undone_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="cannot undo that: a generator, which a module holds, has advanced"):
        assert_is_the_loop(lambda: Marks(Takes))


def test_a_class_attribute_that_is_set_while_reads_are_noted_stays() -> None:
    class Noted(Layer):
        pass

    layer = Noted()
    layer.note = [1]
    with Accesses().noted([layer]):
        assert "note" in vars(Noted)
        Noted.note = "the user's"
    assert vars(Noted)["note"] == "the user's"


def test_classes_are_afterwards_as_they_were() -> None:
    before = {kind: dict(kind.__dict__) for kind in (Leaves, Layer, Stack, nn.Linear, nn.BatchNorm1d)}
    assert_is_the_loop(lambda: Stack(Leaves), round_size=4, recompute=False)
    assert {kind: dict(kind.__dict__) for kind in before} == before
