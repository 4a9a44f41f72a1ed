"""What a repetition writes to that is no attribute of a module leaves no trace: objects, arrays, what hooks hold."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from support.stash.recomputed import X, recomputing
from support.stash.stashed import assert_same, gradients


class Block(nn.Module):
    """Subclasses say what its forward leaves, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        self.leave(y)
        return y

    def leave(self, y: Tensor) -> None:
        raise NotImplementedError

    def left(self) -> Any:
        raise NotImplementedError


@torch.no_grad()
def _average(running: Tensor, y: Tensor) -> None:
    running.mul_(0.9).add_(y.mean(0), alpha=0.1)


class HookHoldsBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(64))
        running = self.get_buffer("running")
        self.linear.register_forward_hook(lambda _module, _args, y: _average(running, y))

    def leave(self, y: Tensor) -> None:
        pass

    def left(self) -> Any:
        return self.get_buffer("running").tolist()


class _Helper:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class HelperHoldsBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(64))
        self.helper = _Helper(self.get_buffer("running"))

    def leave(self, y: Tensor) -> None:
        _average(self.helper.tensor, y)

    def left(self) -> Any:
        return self.helper.tensor.tolist()


class HelperHoldsTensor(HelperHoldsBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.helper = _Helper(torch.zeros(64))


class HelperHoldsStatistics(HelperHoldsBuffer):
    """Written without a new version."""

    def leave(self, y: Tensor) -> None:
        with torch.no_grad():
            nn.functional.batch_norm(y, self.helper.tensor, torch.ones(64), training=True)


@dataclass
class Statistics:
    calls: int = 0
    mean: float = 0.0


class InObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = [Statistics()]
        self.array = np.zeros(2)

    def leave(self, y: Tensor) -> None:
        self.statistics[0].calls += 1
        self.statistics[0].mean += float(y.detach().mean())
        self.array += len(y)

    def left(self) -> Any:
        return self.statistics[0], self.array.tolist()


class InClass(Block):
    calls: ClassVar[int] = 0

    def leave(self, y: Tensor) -> None:
        InClass.calls += 1

    def left(self) -> Any:
        number, InClass.calls = InClass.calls, 0
        return number


class InIterators(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.more = (iter([*range(1000)]), itertools.count(5, -2))

    def leave(self, y: Tensor) -> None:
        for each in (self.numbers, *self.more):
            next(each)

    def left(self) -> Any:
        return [next(each) for each in (self.numbers, *self.more)]


class InHiddenModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.BatchNorm1d(64)]

    def leave(self, y: Tensor) -> None:
        with torch.no_grad():
            self.hidden[0](y)

    def left(self) -> Any:
        return [buffer.tolist() for buffer in self.hidden[0].buffers()]


class Pair(tuple[Any, ...]):
    """Made of two things, unlike a tuple."""

    def __new__(cls, one: Any, other: Any) -> Pair:
        made = super().__new__(cls, (one, other))
        made.name = "pair"
        return made

    name: str


class InContainers(Block):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(torch.zeros(64), 1)
        self.counter: Counter[str] = Counter()
        self.counter["running"] = torch.zeros(64)  # type: ignore[assignment]

    def leave(self, y: Tensor) -> None:
        _average(self.pair[0], y)
        _average(self.counter["running"], y)  # type: ignore[arg-type]
        self.counter[self.pair.name] += 1

    def left(self) -> Any:
        return self.pair[0].tolist(), {name: torch.as_tensor(value).tolist() for name, value in self.counter.items()}


BLOCKS: list[type[Block]] = [
    HookHoldsBuffer,
    HelperHoldsBuffer,
    HelperHoldsTensor,
    HelperHoldsStatistics,
    InObject,
    InClass,
    InIterators,
    InHiddenModule,
    InContainers,
]


def trained(kind: type[Block], recompute: bool) -> tuple[list[Any], int]:
    torch.manual_seed(3)
    model = nn.Sequential(*(kind() for _ in range(2)))
    found: list[Any] = []
    stash = recomputing(model, "?") if recompute else None

    def loss() -> Tensor:
        found.append(model(X).square().sum())
        return found[-1] + model(X * 2).square().sum()

    for _ in range(3):
        found.append(gradients(model, loss, stash))
    left = [block.left() for block in model if isinstance(block, Block)]
    return [*found, left], stash.report().recomputed if stash is not None else 0


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_repetition_leaves_no_trace(kind: type[Block]) -> None:
    (*expected, left), _ = trained(kind, recompute=False)
    (*found, left_now), recomputed = trained(kind, recompute=True)
    assert recomputed == 12
    assert left_now == left
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else assert_same(one, other) is None


def test_another_graph_that_has_saved_what_a_repetition_writes_to_is_told_of_no_write() -> None:
    model = nn.Sequential(HookHoldsBuffer(), nn.Linear(64, 64))
    weight = torch.ones(64, requires_grad=True)
    with recomputing(model, "0") as stash:
        first = model(X).sum()
        running = model[0].get_buffer("running")  # type: ignore[operator]
        second = (weight * running).sum()
        expected = running.clone()
        first.backward()
        second.backward()
    assert stash.report().recomputed == 1
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


class SavesWhatItWrites(Block):
    def __init__(self) -> None:
        super().__init__()
        self.helper = _Helper(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        with torch.no_grad():
            self.helper.tensor.copy_(y.mean(0))
        return y * self.helper.tensor


def test_what_is_saved_itself_and_written_to_afterwards_ends_in_an_error_or_is_made_again() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(SavesWhatItWrites())
    expected = gradients(model, lambda: model(X).sum())

    def loss() -> Tensor:
        made: Tensor = model(X).sum()
        with torch.no_grad():
            model(X * 2)
        return made

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss().backward()
    assert_same(gradients(model, loss, recomputing(model, "0")), expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved_itself_and_not_written_to_afterwards_is_as_it_was(recompute: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(SavesWhatItWrites())
    expected = gradients(model, lambda: model(X).sum())
    stash = recomputing(model, *["0"] * recompute)
    assert_same(gradients(model, lambda: model(X).sum(), stash), expected)
    assert stash.report().recomputed == recompute


def test_an_iterator_that_cannot_be_copied_ends_in_an_error() -> None:
    class InGenerator(Block):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = (number for number in range(1000))

        def leave(self, y: Tensor) -> None:
            next(self.numbers)

    model = nn.Sequential(InGenerator())
    with recomputing(model, "0"):
        loss = model(X).sum()
        with pytest.raises(UnsupportedModel, match="gives something else"):
            loss.backward()


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_check_of_a_round_leaves_no_trace(kind: type[Block]) -> None:
    def left(recompute: bool | None) -> list[Any]:
        torch.manual_seed(3)
        model = nn.Sequential(*(kind() for _ in range(2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with hydra_ext.offload(model, optimizer, budget=2**20, blocks=["0", "1"]) as run:
            for _ in range(2):
                run.step([X, X * 2], lambda x: model(x).square().sum(), recompute=recompute)
        return [block.left() for block in model if isinstance(block, Block)]

    assert left(recompute=True) == left(recompute=False)
