"""Tensors of any kind may lie on modules, as buffers and as attributes: the steps are those of a loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.runtime.rounds.undoing.buffers import note, written
from hydra_ext.runtime.rounds.undoing.module_contents import ModuleContents
from support.rounds.undone import FAILURES, WIDTH, Failure, Layer, Stack, assert_is_the_loop, squared
from support.runtime.odd_tensors import ODD, PLAIN
from support.stash.stashed import assert_same, gradients

KINDS = ODD | PLAIN


class Holds(Layer):
    """One of each kind."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.held = {name: make() for name, make in KINDS.items()}
        for name, value in self.held.items():
            if buffers:
                self.register_buffer(f"_{name}", value, persistent=False)
            else:
                setattr(self, f"_{name}", value)
        if buffers:
            self.held.clear()


@pytest.mark.parametrize("failure", FAILURES[:2], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
def test_steps_with_any_tensor(*, buffers: bool, recompute: bool, failure: Failure | None) -> None:
    report = assert_is_the_loop(lambda: Stack(lambda: Holds(buffers=buffers)), failure, recompute=recompute)
    assert report.fallbacks == 0


@pytest.mark.parametrize("buffers", [False, True])
def test_calls_that_are_made_again_with_any_tensor(*, buffers: bool) -> None:
    model, x = Stack(lambda: Holds(buffers=buffers)), torch.randn(4, WIDTH)
    stash = hydra_ext.stash({"layers.?": hydra_ext.Recompute()}, model=model, device="simulated")
    expected = gradients(model, lambda: squared(model, x))
    assert_same(gradients(model, lambda: squared(model, x), stash), expected)
    assert stash.report().recomputed == 3


def _module(value: Tensor, *, buffer: bool) -> nn.Module:
    module = nn.Module()
    if buffer:
        module.register_buffer("held", value)
    else:
        module.held = value
    return module


@pytest.mark.every_case
@pytest.mark.parametrize("name", KINDS)
def test_what_is_only_read_is_not_taken_for_written(name: str) -> None:
    module, holder = _module(KINDS[name](), buffer=True), _module(KINDS[name](), buffer=False)
    before, contents = note([module]), ModuleContents.of_keys([(holder, "held")])
    assert written(before, note([module])) == []
    assert contents.written() == []


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["sparse", "quantized", "nested", "subclass", "complex", "conjugate"])
def test_what_is_written_is(name: str) -> None:
    module = _module(KINDS[name](), buffer=True)
    before, held = note([module]), module.get_buffer("held")
    held.copy_(held.clone().zero_() if name == "sparse" else held.clone().fill_(2.0))
    assert [noted.module for noted in written(before, note([module]))] == [module]
