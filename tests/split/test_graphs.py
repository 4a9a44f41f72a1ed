"""Graphs that something makes round calls between blocks, and hooks on gradients: right in all cuts that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.split import Rehearsal
from support.split.split_models_own import Layer, Stack, text, text_loss
from support.split.split_stages import assert_same, rehearsed, run, run_plainly, shared

BATCH = text(torch.Generator().manual_seed(1))


def check(model: nn.Module, possible: list[int]) -> Rehearsal:
    """These are the cuts that are offered, and each gives what the model gives."""
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert rehearsal.possible_cuts == possible
    expected = run_plainly(model, text_loss, [BATCH])
    for boundary in possible:
        found = run(model, text_loss, [BATCH], [boundary], rehearsal)
        assert_same(found, expected, shared(model, rehearsal, [boundary]))
    return rehearsal


# ---- functions with a backward of their own --------------------------------------------------------------------------
def view(ctx: Any, x: Tensor) -> Tensor:
    return x.view_as(x)


def itself(ctx: Any, x: Tensor) -> Tensor:
    return x


def changed_copy(ctx: Any, x: Tensor) -> Tensor:
    return x.clone().mul_(2)


def in_place(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def with_graph(ctx: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


class Applied(Stack):
    """Between two layers it applies a function whose second argument the last stages train too."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

        class Reversal(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, _scale: Tensor) -> Tensor:
                return forward(ctx, x)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
                return -gradient, gradient.mean()

        self.reversal = Reversal

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number == 1:
                h = h + 1
                h = self.reversal.apply(h, self.scale)  # type: ignore[no-untyped-call]
            if number == 2:
                h = h * self.scale
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("forward", [view, itself, changed_copy, in_place, with_graph])
def test_no_cut_right_after_a_function_between_blocks(forward: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    rehearsal = check(Applied(forward), [1, 2, 4, 5])
    assert "torch.autograd.Function" in rehearsal.boundaries[3].reasons[0]


class WritesToParts(Stack):
    """Rows of what a layer returned are changed, with and without a graph, while others lie in the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
            first, second = h[:, :6], h[:, 6:]
            first += second.mean()
            with torch.no_grad():
                second *= 0.5
        out: Tensor = self.head(h)
        return out


def test_what_is_written_to_in_place_has_a_new_graph_in_every_stage() -> None:
    torch.manual_seed(0)
    check(WritesToParts(), [1, 2, 3, 4, 5])


# ---- hooks on gradients ----------------------------------------------------------------------------------------------
def normed(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-6)


class HookedLater(Stack):
    """What the first layer returned is used twice more, and gets its hook before the second time."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.layers[0](self.embed(x))
        h = self.layers[1](h) + first
        h = self.layers[2](h)
        first.register_hook(normed)
        out: Tensor = self.head(self.layers[3](h + first))
        return out


class HookedAtOnce(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
            h.register_hook(normed)
            h.retain_grad()
        out: Tensor = self.head(h)
        return out


class HookedFromTheStart(Stack):
    """The hook is on what every stage makes for itself."""

    def __init__(self) -> None:
        super().__init__(Layer)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 2
        scale.register_hook(normed)
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h) * scale
        out: Tensor = self.head(h)
        return out


def test_no_cut_between_a_tensor_and_a_later_hook_on_its_gradient() -> None:
    torch.manual_seed(0)
    rehearsal = check(HookedLater(), [1, 4, 5])
    assert "register_hook" in rehearsal.boundaries[2].reasons[0]


def test_a_hook_where_the_tensor_is_made_sees_its_whole_gradient() -> None:
    torch.manual_seed(0)
    check(HookedAtOnce(), [1, 2, 3, 4, 5])


def test_no_cut_where_the_hook_is_on_what_every_stage_makes() -> None:
    torch.manual_seed(0)
    check(HookedFromTheStart(), [])
