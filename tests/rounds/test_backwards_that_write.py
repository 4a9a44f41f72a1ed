"""What backwards write, or draw, is as in a loop; steps that cannot be undone are not lost for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.rounds.undone import WIDTH, Layer, Stack, assert_is_the_loop

BOTH: list[dict[str, Any]] = [{}, {"round_size": 4, "recompute": False}]


class DrawsBackward(Layer):
    """From one generator in its forward and its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * self.generator.random())
        y.register_hook(lambda gradient: gradient * self.generator.random())
        return y


class Again(Layer):
    """Its forward is run again by a checkpoint of the user's."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        self.count = 0
        self.tensor = torch.zeros(WIDTH)
        self.notes: dict[str, int] = {"calls": 0}
        self.history: list[int] = []
        self.generator = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        used = {
            "count": lambda: self.count,
            "tensor": lambda: float(self.tensor.sum()),
            "dictionary": lambda: self.notes["calls"],
            "list": lambda: len(self.history),
            "generator": lambda: 0,
        }[self.held]()
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False) * 0.9**used
        return y

    def inner(self, x: Tensor) -> Tensor:
        self.count += self.held == "count"
        self.tensor += self.held == "tensor"
        self.notes["calls"] += self.held == "dictionary"
        if self.held == "list":
            self.history.append(1)
        return super().forward(x * (self.generator.random() if self.held == "generator" else 1))

    def left(self) -> list[Any]:
        generator = self.generator.bit_generator.state
        return [self.count, self.tensor.tolist(), dict(self.notes), list(self.history), generator]


class Hooked(Layer):
    """A hook on a gradient writes what the next forward reads."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        self.size = 0.0
        self.sizes = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + self.size + float(self.sizes)))

        def note(gradient: Tensor) -> None:
            if self.held == "attribute":
                self.size = 0.9 * self.size + float(gradient.abs().mean())
            else:
                self.sizes.mul_(0.9).add_(gradient.abs().mean())

        y.register_hook(note)
        return y

    def left(self) -> list[Any]:
        return [self.size, self.sizes.item()]


def left(model: Any) -> list[Any]:
    return [layer.left() for layer in model.layers]


@pytest.mark.parametrize("choices", [*BOTH, {"round_size": 1}], ids=["chosen", "given", "one"])
@pytest.mark.parametrize("held", ["count", "tensor", "dictionary", "list", "generator"])
def test_what_a_checkpoint_writes_again_in_backward_is_written_as_in_a_loop(held: str, choices: dict[str, Any]) -> None:
    assert assert_is_the_loop(lambda: Stack(lambda: Again(held)), extra=left, **choices).fallbacks > 0


@pytest.mark.parametrize("held", ["count", "tensor", "dictionary", "list", "generator"])
def test_by_default_it_is_written_as_in_a_loop(held: str) -> None:
    assert_is_the_loop(lambda: Stack(lambda: Again(held)), extra=left, activations="auto")


@pytest.mark.parametrize("choices", [*BOTH, {"round_size": 1}], ids=["chosen", "given", "one"])
@pytest.mark.parametrize("held", ["attribute", "tensor"])
def test_what_hooks_on_gradients_write_is_written_as_in_a_loop(held: str, choices: dict[str, Any]) -> None:
    assert assert_is_the_loop(lambda: Stack(lambda: Hooked(held)), extra=left, **choices).fallbacks > 0


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
def test_a_generator_that_forward_and_backward_draw_from_is_drawn_from_as_in_a_loop(choices: dict[str, Any]) -> None:
    assert assert_is_the_loop(lambda: Stack(DrawsBackward), **choices).fallbacks > 0


# ---- with hooks after which no step can be undone -------------------------------------------------------------------
def hooked(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        return model

    return made


class Late(Stack):
    """Counts from the third microbatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            if self.calls > 2:
                self.count += 1
            x = layer(x) * (1 + self.count)
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize("size", [1, 2, None])
def test_a_later_round_that_is_refused_is_undone_alone(size: int | None) -> None:
    again = size == 2  # a round of one microbatch has shown what is set, but not that
    report = assert_is_the_loop(hooked(Late), again=again, round_size=size, recompute=False)
    assert report.refusals == (size != 1)


class Norm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: self.norm(super(Norm, self).forward(x)), x, use_reentrant=False)
        return y


@pytest.mark.parametrize("choices", BOTH, ids=["chosen", "given"])
def test_a_backward_that_runs_forward_again_is_seen_before_rounds_that_cannot_be_undone(
    choices: dict[str, Any],
) -> None:
    assert assert_is_the_loop(hooked(lambda: Stack(Norm)), **choices).refusals == 0
