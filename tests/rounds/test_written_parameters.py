"""A forward that writes to parameters, as momentum encoders do, has the effects of a loop, also if it is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.runtime.rounds.microbatch import Work
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


def assert_the_teacher_is_the_loops(
    loss: Callable[[Any, Tensor], Tensor], failure: Failure | None, **options: Any
) -> None:
    """Another offloaded model than the one that is trained."""

    def weights(model: Any) -> list[Any]:
        return [parameter.tolist() for parameter in model.teachers[0].parameters()]

    expected = plain(Taught, weights, loss)
    with ExitStack() as stack:

        def both() -> nn.Module:
            model = Taught()
            stack.enter_context(hydra_ext.offload(model.teachers[0], budget=ROOMY, **options))
            return model

        found, _ = in_rounds(both, failure, weights, loss, activations="auto")
    assert found == expected


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_another_offloaded_model_that_the_function_calls(failure: Failure | None) -> None:
    def taught(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model.teachers[0](x)[:, :4]
        return (model(x) - target).pow(2).mean()

    assert_the_teacher_is_the_loops(taught, failure, checks=Checks(poison_hosts=True))


# ---- around the model's own forward ---------------------------------------------------------------------------------


def told_in_fn(write: Callable[[Tensor, Tensor], None]) -> Callable[[Any, Tensor], Tensor]:
    """Returns a loss that writes to a weight of the model before it calls the model."""

    def told(model: Any, x: Tensor) -> Tensor:
        layer = model.layers[1]
        with torch.no_grad():
            for key, query in zip(layer.key.parameters(), layer.linear.parameters(), strict=True):
                write(key, query)
        return squared(model, x)

    return told


def nothing(_key: Tensor, _query: Tensor) -> None:
    pass


EARLY = (*FAILURES, Failure("forward", step=0, call=1), Failure("backward", step=0, call=2))


@pytest.mark.parametrize("choices", SIZES, ids=str)
@pytest.mark.parametrize("failure", EARLY, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_writes_in_fn_are_undone(
    write: Callable[[Tensor, Tensor], None], failure: Failure | None, choices: dict[str, Any]
) -> None:
    make = lambda: Stack(lambda: Momentum(nothing))  # noqa: E731
    report = assert_is_the_loop(make, failure, loss=told_in_fn(write), activations="auto", **choices)
    assert failure is None or report.retries > 0


@pytest.mark.parametrize("failure", EARLY, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_teacher_that_fn_moves(write: Callable[[Tensor, Tensor], None], failure: Failure | None) -> None:
    def moved(model: Any, x: Tensor) -> Tensor:
        teacher, layer = model.teachers[0], model.layers[0]
        with torch.no_grad():
            for key, query in zip(teacher.linear.parameters(), layer.linear.parameters(), strict=True):
                write(key, query)
            target = teacher(x)[:, :4]
        return (model(x) - target).pow(2).mean()

    assert_the_teacher_is_the_loops(moved, failure)


def test_parameters_are_watched_until_the_optimizer_writes_to_them() -> None:
    """A log of all that it writes would take as much of the host as the model."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[set[str]] = []

    def look(*_: Any) -> None:
        seen.append({str(torch._C._dispatch_keys(parameter)) for parameter in model.parameters()})

    def looked(x: Tensor) -> Tensor:
        look()
        return squared(model, x)

    look()
    with hydra_ext.offload(model, optimizer, budget=ROOMY, activations="auto") as run:
        optimizer.register_step_pre_hook(look)
        run.step([torch.randn(4, WIDTH)], looked)
    look()
    before, in_fn, in_optimizer, after = seen
    assert before == in_optimizer == after
    assert before.isdisjoint(in_fn)


class Trained(nn.Module):
    """A model with a state of its own, which another thread trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.norm(self.linear(x))
        return out


def test_a_model_that_another_thread_trains_is_not_undone() -> None:
    torch.manual_seed(0)
    mine, theirs = Stack(), Trained()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, theirs)]
    x, expected = torch.randn(4, WIDTH), copy.deepcopy(theirs)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).pow(3).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def fails_once(inner: Tensor) -> Tensor:
        if not theirs.calls:
            with ThreadPoolExecutor(1) as other:
                other.submit(train, theirs, optimizers[1]).result()
            raise torch.OutOfMemoryError("scripted: the device is out of memory.")
        return squared(mine, inner)

    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1))
    with (
        hydra_ext.offload(theirs, optimizers[1], budget=ROOMY),
        hydra_ext.offload(mine, optimizers[0], budget=ROOMY) as run,
    ):
        run.step([x], fails_once)
        assert run.report().retries == 1
    assert theirs.calls == 1
    for one, other in zip(theirs.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(one, other)


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
