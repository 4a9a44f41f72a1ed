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
from hydra_ext.state.memory import is_gone, weak
from support.rounds.undone import (
    FAILURES,
    LAYERS,
    MICROBATCHES,
    ROOMY,
    STEPS,
    WIDTH,
    Failure,
    Layer,
    Stack,
    assert_is_the_loop,
    in_rounds,
    plain,
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
    assert failure is None or report.retries > 0
    assert report.fallbacks > 0 or choices.get("round_size") != 2  # which the planner does not choose


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", range(1, 9))
def test_any_microbatch_is_undone(where: str, call: int) -> None:
    """The step's earlier rounds, which have written too, are undone with it once there are gradients."""
    failure = Failure(where, 2, 1, call)
    assert_is_the_loop(lambda: Stack(lambda: Momentum(in_place)), failure, activations="auto")


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

        found, report = in_rounds(both, failure, weights, taught, activations="auto")
    assert found == expected
    assert failure is None or report.retries > 0


EARLY = (*FAILURES, Failure("forward", step=0, call=1), Failure("backward", step=0, call=2))


# ---- writes that come and go ----------------------------------------------------------------------------------------


class Seldom(Momentum):
    """Writes in some microbatches only: their first number is that of the step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] > 0 else Layer.forward(self, x) * (1 + torch.tanh(self.key(x)))


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_begin_in_a_later_step(write: Callable[[Tensor, Tensor], None], failure: Failure | None) -> None:
    report = assert_is_the_loop(lambda: Stack(lambda: Seldom(write)), failure, activations="auto", round_size=2)
    assert report.fallbacks > 0


class Moves(Layer):
    """Tensors that lie in other memory after each forward, and some that grow."""

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


class HeldMoves(Layer):
    """Likewise, but not as buffers: in attributes and in containers, small and large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.zeros(WIDTH), torch.zeros(LARGE)]
        self.large = torch.zeros(LARGE)
        self.history = torch.zeros(1)
        self.grown = {"of": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.held[0].data = self.held[0] * 0.5 + x.mean(0)
            self.held[1].data = self.held[1] + 1
            self.large.data = self.large + self.held[1]
            self.history.resize_(self.history.numel() + 1)
            self.history[-1] = self.held[0].sum()
            self.grown["of"].data = torch.cat([self.grown["of"], self.large[:1]])
        seen = self.history.max() + self.large[-1] + self.held[1][0] + self.grown["of"].sum()
        return super().forward(x) + self.held[0] * seen / 100


LARGE = 2**18 + 1  # more than a tensor has that is compared each time


def of_history(model: Any) -> list[Any]:
    layers = [layer for layer in model.layers if isinstance(layer, HeldMoves)]
    return [(layer.history.tolist(), layer.grown["of"].tolist(), layer.large[0].item()) for layer in layers]


@pytest.mark.parametrize("choices", SIZES, ids=str)
@pytest.mark.parametrize("failure", EARLY, ids=str)
@pytest.mark.parametrize("layer", [Moves, HeldMoves])
def test_tensors_that_move_and_grow(
    layer: Callable[[], Layer], failure: Failure | None, choices: dict[str, Any]
) -> None:
    report = assert_is_the_loop(lambda: Stack(layer), failure, extra=of_history, activations="auto", **choices)
    assert failure is None or report.retries > 0


class Bank(Layer):
    """A large buffer that one step writes without a new version, and the next one with."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("bank", torch.zeros(LARGE))
        else:
            self.bank = torch.zeros(LARGE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if x[0, 0] == 0:
                self.bank.data.add_(x.sum())
            else:
                self.bank.add_(1)
        return super().forward(x) * (1 + torch.tanh(self.bank[-1]))


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("buffer", [False, True])
def test_large_tensors_are_put_back_to_what_they_were(buffer: bool, failure: Failure | None) -> None:
    make = lambda: Stack(lambda: Bank(buffer=buffer))  # noqa: E731
    report = assert_is_the_loop(make, failure, extra=lambda model: model.layers[0].bank.sum().item())
    assert failure is None or report.retries > 0


def test_memory_that_a_buffer_leaves_is_free_at_once() -> None:
    freed: list[bool] = []

    class Leaves(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(LARGE))
            self.held = torch.zeros(LARGE)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for each in (self.mean, self.held):
                    before = weak(each.untyped_storage())
                    each.data = each + 1
                    freed.append(is_gone(before))
            return super().forward(x) * (1 + self.mean[0])

    report = assert_is_the_loop(lambda: Stack(Leaves), Failure("forward", step=0, call=1), activations="auto")
    assert report.retries > 0
    assert len(freed) > 2 * LAYERS * MICROBATCHES * STEPS
    assert all(freed)


# ---- which parameters are trained -----------------------------------------------------------------------------------


class Thaws(Layer):
    """Is trained from the end of its first forward on, or of one in a later step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if x[0, 0] >= self._step:
            self.linear.weight.requires_grad_(True)
        return made


@pytest.mark.parametrize("choices", SIZES, ids=str)
@pytest.mark.parametrize("failure", EARLY, ids=str)
def test_a_weight_that_a_forward_begins_to_train(failure: Failure | None, choices: dict[str, Any]) -> None:
    step = 0 if failure is None else failure.step

    class First(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0] = Thaws(step)

    report = assert_is_the_loop(First, failure, activations="auto", **choices)
    assert failure is None or report.retries > 0
