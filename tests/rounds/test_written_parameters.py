"""A forward that writes to parameters, as momentum encoders do, has the effects of a loop, also if it is undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.runtime.rounds.microbatch import Work
from support.rounds.undone import (
    FAILURES,
    MICROBATCHES,
    ROOMY,
    WIDTH,
    Failure,
    Layer,
    Stack,
    assert_is_the_loop,
    batches,
    in_rounds,
    plain,
    squared,
)


def in_place(key: Tensor, query: Tensor) -> None:
    key.mul_(0.75).add_(query, alpha=0.25)


def in_data(key: Tensor, query: Tensor) -> None:
    key.data.mul_(0.75).add_(query.data, alpha=0.25)


def replaced(key: Tensor, query: Tensor) -> None:
    key.data = key.data * 0.75 + query.data * 0.25


class Momentum(Layer):
    """One half follows the other, as the key encoder of MoCo (He et al., CVPR 2020) does.

    Args:
        write: Writes the mean of a key and a query to the key.
        trained: Whether the key is trained as well.
    """

    def __init__(self, write: Callable[[Tensor, Tensor], None], *, trained: bool = False) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH).requires_grad_(trained)
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.linear.parameters(), strict=True):
                self._write(key, query)
        return super().forward(x) * (1 + torch.tanh(self.key(x)))


class Ahead(Stack):
    """Writes to parameters of a later block, which no graph saves, before that block reads them."""

    def __init__(self) -> None:
        super().__init__(lambda: Momentum(in_place))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.bias.mul_(0.5).add_(x.mean())
        return super().forward(x)


WRITES = [in_place, in_data, replaced]
SIZES: list[dict[str, Any]] = [{}, {"round_size": 1}, {"round_size": 2}, {"recompute": True}]


@pytest.mark.parametrize("choices", SIZES, ids=str)
@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_momentum_encoder_has_the_values_of_a_loop(
    write: Callable[[Tensor, Tensor], None], failure: Failure | None, choices: dict[str, Any]
) -> None:
    report = assert_is_the_loop(lambda: Stack(lambda: Momentum(write)), failure, activations="auto", **choices)
    assert report.fallbacks > 0 or choices.get("round_size") != 2  # which the planner does not choose


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", range(1, MICROBATCHES + 1))
def test_any_microbatch_is_undone(where: str, call: int) -> None:
    """The step's earlier rounds, which have written too, are undone with it once there are gradients."""
    failure = Failure(where, 2, 1, call)
    assert_is_the_loop(lambda: Stack(lambda: Momentum(in_place)), failure, activations="auto")


def fails(times: int) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss that runs out of memory where the model is offloaded: in the backward of a step's second microbatch."""
    left, second = [times], batches()[1][1]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found = squared(model, x)
        if left[0] and "_hydra_ext_context" in vars(model) and torch.equal(x, second):
            left[0] -= 1
            found.register_hook(_out_of_memory)
        return found

    return loss


def _out_of_memory(_gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("scripted: the device is out of memory.")


@pytest.mark.parametrize("size", [1, 2])
def test_all_that_may_fit_is_tried_whatever_size_of_rounds_was_given(size: int) -> None:
    """Three times as planned or given, then the frugal way, then in pieces."""
    make = lambda: Stack(lambda: Momentum(in_place))  # noqa: E731
    report = assert_is_the_loop(make, loss=fails(4), activations="auto", round_size=size)
    assert report.retries == 4
    with pytest.raises(torch.OutOfMemoryError, match="ran the microbatches one at a time, with nothing"):
        assert_is_the_loop(make, loss=fails(9), activations="auto", round_size=size)


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_parameters_that_are_trained_too(failure: Failure | None) -> None:
    make = lambda: Stack(lambda: Momentum(in_data, trained=True))  # noqa: E731
    assert_is_the_loop(make, failure, activations="auto")


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_parameters_that_are_read_in_another_block_than_they_are_written(failure: Failure | None) -> None:
    assert_is_the_loop(Ahead, failure, activations="auto")


def test_a_first_round_of_one_microbatch_tells_it() -> None:
    report = assert_is_the_loop(lambda: Stack(lambda: Momentum(in_place)))
    assert (report.refusals, report.fallbacks > 0) == (0, True)


class Taught(Stack):
    """Learns from a model that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.teachers = [Momentum(in_place)]  # in no module


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_another_offloaded_model_that_the_function_calls(failure: Failure | None) -> None:
    def taught(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model.teachers[0](x)[:, :4]
        return (model(x) - target).pow(2).mean()

    def weights(model: Any) -> list[Any]:
        return [parameter.tolist() for parameter in model.teachers[0].parameters()]

    expected = plain(Taught, weights, taught)
    with ExitStack() as stack:

        def both() -> nn.Module:
            model = Taught()
            stack.enter_context(hydra_ext.offload(model.teachers[0], budget=ROOMY, checks=Checks(poison_hosts=True)))
            return model

        found, _ = in_rounds(both, failure, weights, taught, activations="auto")
    assert found == expected


class Seldom(Momentum):
    """Writes in some microbatches only: their first number is that of the step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] > 0 else Layer.forward(self, x) * (1 + torch.tanh(self.key(x)))


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_begin_in_a_later_step(write: Callable[[Tensor, Tensor], None], failure: Failure | None) -> None:
    report = assert_is_the_loop(lambda: Stack(lambda: Seldom(write)), failure, activations="auto", round_size=2)
    assert report.fallbacks > 0


def test_forwards_after_a_step_that_was_interrupted_before_its_first_are_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log of what forwards overwrite would keep a copy of each parameter that they write to."""

    def interrupted(_: Work[Tensor]) -> int:
        raise KeyboardInterrupt

    model = Stack(lambda: Momentum(in_place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        monkeypatch.setattr(Work, "nbytes", property(interrupted))
        with pytest.raises(KeyboardInterrupt):
            run.step(batches()[0], lambda x: squared(model, x))
        squared(model, batches()[0][0]).backward()
        assert run._stepper._undo.overwritten() == []


class Moves(Layer):
    """A buffer that lies in other memory after each forward, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("history", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.data = self.mean * 0.5 + x.mean(0)
            self.history.resize_(self.history.numel() + 1)
            self.history[-1] = self.mean.sum()
        return super().forward(x) + self.mean * self.history.max()


@pytest.mark.parametrize("choices", SIZES, ids=str)
@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_buffers_that_move_and_grow(failure: Failure | None, choices: dict[str, Any]) -> None:
    assert_is_the_loop(lambda: Stack(Moves), failure, activations="auto", **choices)
