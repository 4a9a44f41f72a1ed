"""Backward hooks of a block run round it: it may not be skipped; those of modules inside it are no matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.split.split_models_own import Stack, text, text_loss
from support.split.split_stages import assert_same, rehearsed, run, run_plainly

BATCH = text(torch.Generator().manual_seed(1))


def halved(_module: nn.Module, gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


def hooked(kind: str, block: int, inner: str = "") -> Stack:
    torch.manual_seed(0)
    model = Stack()
    getattr(model.layers[block].get_submodule(inner), kind)(halved)
    return model


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_block_with_backward_hooks_is_never_skipped_and_the_cut_is_refused_with_the_reason(kind: str) -> None:
    model = hooked(kind, 1)
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert rehearsal.possible_cuts == [1]  # layers.1 is event 2, and the cut before it is where its hooks begin
    for boundary in range(2, len(rehearsal.events)):
        assert "block layers.1 has backward hooks" in rehearsal.boundaries[boundary].reasons[0]
    assert_same(run(model, text_loss, [BATCH], [1], rehearsal), run_plainly(model, text_loss, [BATCH]))


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_inside_a_block_allow_all_cuts(kind: str) -> None:
    model = hooked(kind, 1, "down")
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    expected = run_plainly(model, text_loss, [BATCH])
    assert not torch.equal(expected.gradients["embed.weight"], run_plainly_unhooked().gradients["embed.weight"])
    for boundary in rehearsal.possible_cuts:
        assert_same(run(model, text_loss, [BATCH], [boundary], rehearsal), expected)


def run_plainly_unhooked() -> Any:
    torch.manual_seed(0)
    return run_plainly(Stack(), text_loss, [BATCH])
