"""Models whose layers hold state of any kind, trained by a plain loop and by ``run.step`` that may have to undo."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks

WIDTH, LAYERS, MICROBATCHES, STEPS = 16, 3, 4, 3
ROOMY = 2**25


class Layer(nn.Module):
    """A layer; subclasses define its state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Failure:
    """A device that runs out of memory once.

    Attributes:
        where: "forward" or "backward" of the layer.
        layer: Number of the layer.
        step: Number of the step, from 0.
        call: Number of the layer's call in that step, from 1, repetitions included.
    """

    where: str = "forward"
    layer: int = 1
    step: int = 1
    call: int = 3


FAILURES = (None, Failure("forward"), Failure("backward", call=2))
Extra = Callable[[Any], Any]


def batches() -> list[list[Tensor]]:
    """Returns batches whose first number is that of their step."""
    generator = torch.Generator().manual_seed(1)
    found = [[torch.randn(4, WIDTH, generator=generator) for _ in range(MICROBATCHES)] for _ in range(STEPS)]
    for step, inputs in enumerate(found):
        for x in inputs:
            x[0, 0] = step
    return found


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def _begin(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(3)
    np.random.seed(3)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _left(model: nn.Module, losses: Sequence[Tensor], extra: Extra) -> list[Any]:
    tensors = [value.to_dense().tolist() for value in model.state_dict().values()]
    hosts = random.getstate(), np.random.get_state()[1].tolist()
    return [*[loss.item() for loss in losses], *tensors, *hosts, extra(model)]


def seeds(step: int) -> range:
    return range(100 * step, 100 * step + MICROBATCHES)


def plain(make: Callable[[], nn.Module], extra: Extra, loss: Any) -> list[Any]:
    model, optimizer = _begin(make)
    losses: list[Tensor] = []
    for step, inputs in enumerate(batches()):
        for seed, x in zip(seeds(step), inputs, strict=True):
            torch.manual_seed(seed)
            losses.append(loss(model, x))
            (losses[-1] / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _left(model, losses, extra)


def in_rounds(
    make: Callable[[], nn.Module],
    failure: Failure | None,
    extra: Extra,
    loss: Any,
    again: int = 0,
    activations: Literal["auto"] | None = None,
    **choices: Any,
) -> tuple[list[Any], hydra_ext.Report]:
    model: Any
    model, optimizer = _begin(make)
    losses: list[Tensor] = []
    calls, armed = [0], [False]

    def counted(*_: Any) -> None:
        calls[0] += armed[0]
        if armed[0] and failure is not None and calls[0] == failure.call:
            armed[0] = False
            raise torch.OutOfMemoryError("scripted: the device is out of memory.")

    def called(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if failure is not None and failure.where == "forward":
            counted()
        elif output.requires_grad:
            output.register_hook(counted)

    if failure is not None:
        model.layers[failure.layer].register_forward_hook(called)
    others = [child for child in model.children() if not isinstance(child, nn.ModuleList)]
    blocks, checks = [*model.layers, *others], Checks(poison_hosts=True)
    with hydra_ext.offload(
        model, optimizer, budget=ROOMY, blocks=blocks, checks=checks, activations=activations
    ) as run:
        for step, inputs in enumerate(batches()):
            armed[0] = failure is not None and step == failure.step
            losses += run.step(inputs, lambda x: loss(model, x), seeds=list(seeds(step)), **choices).losses
        report = run.report()
    assert report.windows > 0
    assert failure is None or calls[0] == failure.call
    assert failure is None or report.retries > 0
    assert activations is not None or report.retries == (failure is not None) + again
    return _left(model, losses, extra), report


def assert_is_the_loop(
    make: Callable[[], nn.Module],
    failure: Failure | None = None,
    *,
    extra: Extra = lambda _: None,
    loss: Any = squared,
    again: int = 0,
    activations: Literal["auto"] | None = None,
    **choices: Any,
) -> hydra_ext.Report:
    """Asserts that ``run.step`` gives the results of the plain loop.

    Args:
        again: Number of rounds that run twice because of what their first forward has shown; not for "auto", under
            which the rounds depend on measurements.
        activations: As for ``offload``. By default all of them stay, and the first round has one microbatch.
    """
    expected = plain(make, extra, loss)
    found, report = in_rounds(make, failure, extra, loss, again, activations, **choices)
    assert len(found) == len(expected)
    assert [index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other] == []
    return report
