"""What a module's forward reads besides parameters is for a second call as the first call found it, however deep."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ext import _C
from support.stash.recomputed import X, recomputing
from support.stash.stashed import assert_same, gradients


class Block(nn.Module):
    """Its result depends on how often it was called before, which subclasses keep somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x * self.factor()).tanh()
        return y

    def factor(self) -> Any:
        raise NotImplementedError


# ---- counters -------------------------------------------------------------------------------------------------------
class InList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [1]

    def factor(self) -> Any:
        self.calls[0] += 1
        return self.calls[0]


class InNested(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = {"inner": ([1], deque([2]))}

    def factor(self) -> Any:
        self.calls["inner"][0][0] += 1
        self.calls["inner"][1].append(3)
        return self.calls["inner"][0][0] + len(self.calls["inner"][1])


class InCounter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.more: defaultdict[int, list[int]] = defaultdict(list)

    def factor(self) -> Any:
        self.calls["all"] += 1
        self.more[self.calls["all"] % 2].append(1)
        return self.calls["all"] + len(self.more[0])


class InSet(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls: set[int] = set()

    def factor(self) -> Any:
        self.calls.add(len(self.calls))
        return len(self.calls)


class InObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(calls=0, inner=SimpleNamespace(calls=[0]))

    def factor(self) -> Any:
        self.helper.calls += 1
        self.helper.inner.calls[0] += 2
        return self.helper.calls + self.helper.inner.calls[0]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class InSlots(Block):
    def __init__(self) -> None:
        super().__init__()
        self.helpers = (Slotted(),)

    def factor(self) -> Any:
        self.helpers[0].calls += 1
        return self.helpers[0].calls


class InClass(Block):
    calls: ClassVar[list[int]] = [0]

    def factor(self) -> Any:
        self.calls[0] += 1
        return self.calls[0] % 6 + 1


class InArray(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held = [np.ones(2)]

    def factor(self) -> Any:
        self.held[0] += 1
        return float(self.held[0][1])


class InIterator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.more = [iter([*range(1, 100)])]

    def factor(self) -> Any:
        return next(self.numbers) + next(self.more[0])


class InHiddenModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Any] = [nn.Identity()]
        self.hidden[0].calls = 0
        self.hidden[0].register_buffer("seen", torch.zeros(()))

    def factor(self) -> Any:
        self.hidden[0].calls += 1
        self.hidden[0].seen.add_(1)
        return self.hidden[0].calls + self.hidden[0].seen.clone()


# ---- tensors --------------------------------------------------------------------------------------------------------
class InTensor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.ones(64)

    def factor(self) -> Any:
        self.calls.add_(1)
        return self.calls.clone()


class InListOfTensors(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [torch.ones(64), (torch.ones(64),)]

    def factor(self) -> Any:
        self.calls[0].add_(1)  # type: ignore[attr-defined]
        self.calls[1][0].mul_(2)
        return self.calls[0] + self.calls[1][0]


class InTensorOfObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(calls=torch.ones(64))

    def factor(self) -> Any:
        self.helper.calls.add_(1)
        return self.helper.calls.clone()


class InAppended(Block):
    """A cache on the module, with what earlier calls gave."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.cache.append(y.detach())
        return y + torch.stack(self.cache).sum(0).sin() * y

    def factor(self) -> Any:
        return 1 + len(self.cache)


class InReplaced(Block):
    """A list whose tensors are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.state = [torch.zeros(64)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh() * (self.state[0] + 1)
        self.state[0] = y.detach().mean(0)
        return y


# ---- random numbers -------------------------------------------------------------------------------------------------
class OwnRandom(random.Random):
    pass


class OwnGenerator(torch.Generator):
    pass


class OwnNumpys(np.random.RandomState):
    pass


SOURCES: dict[str, Any] = {
    "derived": lambda: OwnRandom(3),
    "in a list": lambda: [random.Random(3)],
    "in a dict": lambda: {"source": np.random.default_rng(3)},
    "in an object": lambda: SimpleNamespace(source=torch.Generator().manual_seed(3)),
    "derived torch's": lambda: OwnGenerator().manual_seed(3),
    "derived numpy's": lambda: OwnNumpys(3),
    "bits": lambda: [np.random.PCG64(3)],
}


def drawn(held: Any) -> float:
    source = held
    if isinstance(held, list):
        source = held[0]
    elif isinstance(held, dict):
        source = held["source"]
    elif isinstance(held, SimpleNamespace):
        source = held.source
    if isinstance(source, torch.Generator):
        return float(torch.rand((), generator=source))
    if isinstance(source, np.random.BitGenerator):
        return float(source.random_raw() % 97)
    return float(source.random())


class Drawing(Block):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def factor(self) -> Any:
        return drawn(self.source)


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(InList, InNested, InCounter, InSet, InObject, InSlots, InClass, InArray, InIterator, InHiddenModule),
        *(InTensor, InListOfTensors, InTensorOfObject, InAppended, InReplaced),
    )
}
KINDS |= {f"Drawing: {name}": lambda made=made: Drawing(made()) for name, made in SOURCES.items()}


def trained(make: Any, *, recompute: bool) -> list[Tensor]:
    """Losses and gradients of three steps, in which each block is called twice before the backward."""
    torch.manual_seed(3)
    InClass.calls[0] = 0
    model = nn.Sequential(make(), make())
    stash = recomputing(model, *["?"] * recompute)
    found: list[Tensor] = []
    for _ in range(3):
        found += gradients(model, lambda: model(X).square().sum() + model(X * 2).sum(), stash)
    assert stash.report().recomputed == 12 * recompute
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_second_call_begins_as_the_first_did(name: str) -> None:
    expected = trained(KINDS[name], recompute=False)
    assert_same(trained(KINDS[name], recompute=True), expected)


class Given(nn.Module):
    """Draws from what it is given, and counts there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        given.helpers[0].calls += 1
        given.seen.append(given.helpers[0].calls)
        factor = drawn(given) + len(given.seen) + given.helpers[0].calls
        y: Tensor = self.linear(x * factor).tanh()
        return y


@pytest.mark.parametrize("source", [lambda: OwnRandom(3), lambda: torch.Generator(), lambda: np.random.default_rng(3)])
def test_and_so_is_what_it_is_given(source: Any) -> None:
    def trained(*names: str) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.ModuleList(Given() for _ in range(2))
        given = SimpleNamespace(source=source(), seen=deque(), helpers=[Slotted()])
        if isinstance(given.source, torch.Generator):
            given.source.manual_seed(3)
        stash = recomputing(model, *names)
        found = gradients(model, lambda: model[1](model[0](X, given), given).square().sum(), stash)
        assert stash.report().recomputed == (2 if names else 0)
        return [*found, torch.tensor([*given.seen, drawn(given)])]

    assert_same(trained("?"), trained())


def test_what_was_replaced_meanwhile_is_there_again_afterwards() -> None:
    model = nn.Sequential(InList())
    block: Any = model[0]
    expected = gradients(model, lambda: model(X).sum())
    block.calls = [1]
    first = block.calls
    with recomputing(model, "0") as stash:
        torch.manual_seed(11)
        loss = model(X).sum()
        block.calls = later = [70]
        first.append(5)
        loss.backward()
    assert stash.report().recomputed == 1
    assert block.calls is later
    assert (later, first) == ([70], [2, 5])
    assert_same([parameter.grad for parameter in model.parameters()], expected[1:])


# ---- memory ---------------------------------------------------------------------------------------------------------
def test_a_second_call_has_one_copy_of_a_buffer_on_the_device() -> None:
    """The call writes to that copy; what restores the buffer afterwards is on the host."""

    def taken(size: int) -> int:
        class Written(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(size))
                self.linear = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                self.seen.add_(1)
                y: Tensor = self.linear(x).tanh()
                return y

        model = nn.Sequential(nn.Linear(64, 64), Written())
        stash = recomputing(model, "1", budget="64MiB")
        meter = _C.testing.Meter()
        for _ in range(2):  # in the second pass nothing leaves
            with stash:
                loss = model(X).sum()
            meter.ledger.reset_peak()
            meter.begin()
            try:
                loss.backward()
            finally:
                meter.end()
        assert stash.report().recomputed == 2
        return meter.ledger.peak

    size = 2**17
    copies = (taken(size) - taken(1)) / (4 * size)
    assert round(copies, 1) == 1
