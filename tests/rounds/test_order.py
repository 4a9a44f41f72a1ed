"""What microbatches write to in place is written in the order of a loop, or they run one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.rounds.undone import WIDTH, Layer, Stack, assert_is_the_loop


class Averaging(Layer):
    """Running statistics: those of the last call count most."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(super().forward(x))
        return y


class Twice(Stack):
    """Each microbatch passes its layers twice, as both inputs of a pair do."""

    def __init__(self) -> None:
        super().__init__(Averaging)

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Shared(Stack):
    """One norm behind every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        out: Tensor = self.head(x)
        return out


class Detour(Stack):
    """Which microbatches of a large first number make, after which the others are ahead."""

    def __init__(self) -> None:
        super().__init__(Averaging)
        self.detour = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.detour(x) if x[1, 0] > 0 else x)


class Around(Stack):
    """What it has written before its layers, it reads after them."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        self.tensor = torch.zeros(())
        self.notes: dict[str, int] = {"calls": 0}
        self.parts: list[Tensor] = []
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.parts.clear()
        for index, layer in enumerate(self.layers):
            if index == 1:
                self.write(x)
            x = layer(x)
        out: Tensor = self.head(x) * (1 + self.read() / 10)
        return out

    def write(self, x: Tensor) -> None:
        if self.held == "tensor":
            self.tensor += 1
        elif self.held == "buffer":
            self.calls += 1
        elif self.held == "dictionary":
            self.notes["calls"] += 1
        else:
            self.parts.append(x.mean())

    def read(self) -> Any:
        return self.tensor + self.calls + self.notes["calls"] + sum(self.parts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "shared": Shared,
    "detour": Detour,
    **{held: lambda held=held: Around(held) for held in ("tensor", "buffer", "dictionary", "list")},  # type: ignore[misc]
}


@pytest.mark.parametrize("choices", [{}, {"round_size": 4, "recompute": False}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_what_is_written_in_another_order_is_written_by_one_microbatch_at_a_time(
    make: Callable[[], nn.Module], choices: dict[str, Any]
) -> None:
    report = assert_is_the_loop(make, again=unknown_around(make(), choices), **choices)
    assert report.refusals == 1
    assert report.fallbacks > 0


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_by_default_it_is_written_as_in_a_loop(make: Callable[[], nn.Module]) -> None:
    assert_is_the_loop(make, activations="auto")


def unknown_around(model: nn.Module, choices: dict[str, Any]) -> bool:
    """Whether no round of one microbatch shows first what is written around layers."""
    return isinstance(model, Around) and len(choices) == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_statistics_of_layers_that_each_microbatch_calls_once_refuse_no_round(recompute: bool) -> None:
    report = assert_is_the_loop(lambda: Stack(Averaging), recompute=recompute)
    assert (report.refusals, report.fallbacks) == (0, 0)


class Logs(Stack):
    """Code around the layers that writes what is not read before the microbatch has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.pairs = nn.ModuleList([Pair(*self.layers[:2])])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers[2](self.pairs[0](x)))
        self.history.append(float(out.detach().mean()))
        return out


class Pair(nn.Module):
    """Written to while other microbatches are between its layers, and after them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.total.mul_(0.5).add_(x.detach().mean())
        return x * (1 + self.total)


def logged(model: Logs, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    model.history.append(loss.item())
    return loss


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_written_around_layers_in_order_refuses_no_round(recompute: bool) -> None:
    def extra(model: Logs) -> list[Any]:
        return [model.history, model.pairs[0].total.item()]

    report = assert_is_the_loop(Logs, loss=logged, extra=extra, recompute=recompute)
    assert (report.refusals, report.fallbacks) == (0, 0)
