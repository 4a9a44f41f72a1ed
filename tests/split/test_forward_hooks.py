"""Forward hooks on modules inside blocks: those that hand out values run everywhere, those that look with the block."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.split import Rehearsal
from support.split.split_models_own import Stack, text, text_loss
from support.split.split_stages import assert_same, cut, rehearsed, run, run_plainly

BATCHES = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2)]


class Looks:
    """Keeps numbers about what goes in and out."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def with_arguments(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.seen.append(args[0].norm().item() + len(kwargs) + output.norm().item())

    def __call__(self, _module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(args[0].norm().item() + output.norm().item())


def look(seen: list[float], _module: nn.Module, args: Any, output: Tensor) -> None:
    seen.append(args[0].norm().item() + output.norm().item())


def check(model: nn.Module) -> Rehearsal:
    rehearsal = rehearsed(model, text_loss, BATCHES[0])
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    expected = run_plainly(model, text_loss, BATCHES)
    for boundary in rehearsal.possible_cuts:
        assert_same(run(model, text_loss, BATCHES, [boundary], rehearsal), expected)
    return rehearsal


def seen_in(model: nn.Module) -> list[list[list[float]]]:
    """What each hook of each layer has seen."""
    found = []
    for layer in model.layers:
        with_arguments, called = layer.up._forward_hooks.values()
        (partial,) = layer.down._forward_hooks.values()
        found.append([with_arguments.__self__.seen, called.seen, partial.args[0]])
    return found


def test_hooks_that_look_run_where_the_block_runs() -> None:
    torch.manual_seed(0)
    model = Stack()
    for layer in model.layers:
        layer.up.register_forward_hook(Looks().with_arguments, with_kwargs=True)
        layer.up.register_forward_hook(Looks())
        layer.down.register_forward_hook(functools.partial(look, []))
    rehearsal = check(model)
    for seen in itertools.chain.from_iterable(seen_in(model)):
        seen.clear()
    stages = cut(model, text_loss, rehearsal, [2])
    for batch in BATCHES:
        stages.forward(batch)
        text_loss(model, batch)
    expected = seen_in(model)
    assert {len(seen) for seen in itertools.chain.from_iterable(expected)} == {len(BATCHES)}
    first, second = map(seen_in, stages.models)
    nothing: list[list[float]] = [[], [], []]
    assert first == [expected[0], nothing, nothing, nothing]
    assert second == [nothing, *expected[1:]]


class Collects(Stack):
    """What its layers computed inside comes out into one list, of which it uses some places."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for layer in self.layers:
            layer.up.register_forward_hook(self.collect)

    def collect(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.found.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        out: Tensor = super().forward(x)
        return out + self.found[1].mean() - self.found[3].mean()


def test_a_hook_that_hands_out_values_runs_for_each_module_whatever_is_used_of_them() -> None:
    torch.manual_seed(0)
    rehearsal = check(Collects())
    assert len(rehearsal.handing_out) == 1
