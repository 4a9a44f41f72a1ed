"""Stages under autocast: each has the precision of the whole model, and adds up what its weights get in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.split.split_models import LIBRARY, Batch
from support.split.split_models_own import OWN, Stack, text, text_loss
from support.split.split_stages import assert_same, even_cuts, rehearsed, run, run_plainly, shared


def in_bfloat16(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        subject = next(s for s in (LIBRARY | OWN).values() if s.name == model.subject)
        loss: Tensor = subject.fn(model, batch)
    return loss


@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "outside_residual", "repeats"])
def test_autocast_stays_in_the_stage(name: str) -> None:
    subject = (LIBRARY | OWN)[name]
    model = subject.make()
    model.subject = name
    batches = subject.batches(2)
    rehearsal = rehearsed(model, in_bfloat16, batches[0])
    found = run(model, in_bfloat16, batches, even_cuts(rehearsal, 3), rehearsal)
    expected = run_plainly(model, in_bfloat16, batches)
    assert not torch.is_autocast_enabled("cpu")
    held_twice = shared(model, rehearsal, even_cuts(rehearsal, 3))
    for name in held_twice:  # their parts are rounded to 8 bits each
        assert torch.allclose(found.gradients.pop(name), expected.gradients.pop(name), rtol=0.05, atol=0.02)
    assert_same(found, expected)


class FourTimes(Stack):
    """One layer, four times."""

    def __init__(self) -> None:
        super().__init__(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(4):
            h = self.layers[0](h)
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("cuts", [[2], [3], [4], [2, 4], [2, 3, 4]])
def test_under_autocast_a_weights_uses_are_added_up_in_16_bits_on_each_stage(cuts: list[int]) -> None:
    """Three sums here and up to two there, each rounded to 8 bits: five times 1/256 could be, half of it is seen."""

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return text_loss(model, batch)

    for seed in range(8):
        torch.manual_seed(seed)
        model = FourTimes()
        batches = [text(torch.Generator().manual_seed(seed))]
        rehearsal = rehearsed(model, fn, batches[0])
        held_twice = shared(model, rehearsal, cuts)
        assert {name.partition(".")[0] for name in held_twice} == {"layers"}
        found = run(model, fn, batches, cuts, rehearsal)
        assert_same(found, run_plainly(model, fn, batches), held_twice, tolerance=1e-2)
