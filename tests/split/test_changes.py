"""A wrong rehearsal, or another way than rehearsed, is an error at once, or right; never a wrong loss."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.errors import SplitError
from support.split.split_models import LIBRARY, Subject
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN, Layer, Stack, text, text_loss
from support.split.split_stages import bound, cut, even_cuts, rehearsed, run_plainly, without

SUBJECTS = LIBRARY | OWN | MORE
SAMPLE = (
    "llama_mask",
    "mixtral_router",
    "t5",
    "outside_residual",
    "in_place",
    "on_modules",
    "branches",
    "reads",
    "collects",
)


def check_every_drop(subject: Subject, boundaries: list[int]) -> int:
    model = subject.make()
    (batch,) = subject.batches(1)
    rehearsal = rehearsed(model, subject.fn, batch)
    dropped = 0
    for boundary in boundaries or rehearsal.possible_cuts:
        for key in rehearsal.boundaries[boundary].values:
            stages = cut(model, subject.fn, without(rehearsal, boundary, key), [boundary])
            with pytest.raises(SplitError):
                stages.forward(batch)
            dropped += 1
    return dropped


@pytest.mark.parametrize("name", SAMPLE)
def test_a_value_that_does_not_cross_is_missed(name: str) -> None:
    subject = SUBJECTS[name]
    (boundary,) = even_cuts(rehearsed(subject.make(), subject.fn, subject.batches(1)[0]), 2)
    assert check_every_drop(subject, [boundary]) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_any_value_at_any_cut_that_does_not_cross_is_missed(name: str) -> None:
    assert check_every_drop(SUBJECTS[name], []) > 0


@pytest.mark.parametrize("name", SAMPLE)
def test_a_stage_in_the_middle_sends_nothing_that_depends_on_what_did_not_come(name: str) -> None:
    subject = SUBJECTS[name]
    model = subject.make()
    (batch,) = subject.batches(1)
    rehearsal = rehearsed(model, subject.fn, batch)
    first, second = even_cuts(rehearsal, 3)
    (*_, key) = rehearsal.boundaries[first].values
    stages = cut(model, subject.fn, without(rehearsal, first, key), [first, second])
    leaving = stages.programs[0].forward(bound(subject.fn, stages.models[0]), batch, None, seed=7, divisor=1).leaving
    with pytest.raises(SplitError, match=r"a value (of another stage|that has not come)"):
        stages.programs[1].forward(bound(subject.fn, stages.models[1]), batch, leaving, seed=7, divisor=1)


class Changing(Stack):
    """Takes another way after the rehearsal."""

    way = ""
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if self.way == "old value" and i == 2:
                h = h + first
            if self.way == "early glue" and i == 0:
                h = h + 1
            if self.way == "glue twice" and i in (0, 1):
                h = h * 2
            if self.way == "other order" and i == 1:
                h = self.layers[0](h)
            if self.way == "chooses" and i == 3:
                h = torch.where(x[..., None] > 30, h, first)
            if self.way == "other function" and i == 1:
                h = h - 0.5
            elif i == 1:
                h = h + 0.5
        if self.way == "reads value":
            h = h * float(first.detach().mean())
        if self.way == "one less":
            return F.linear(h, self.head.weight, self.head.bias)
        out: Tensor = self.head(h)
        return out


WAYS = ("old value", "early glue", "glue twice", "other order", "chooses", "other function", "reads value", "one less")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["after the rehearsal", "after a microbatch"])
def test_another_way_than_rehearsed_is_an_error_or_is_rehearsed(way: str, when: str) -> None:
    """The first stage goes back and rehearses where it sees the change; the others have no way to tell it."""
    torch.manual_seed(0)
    model = Changing()
    batch = text(torch.Generator().manual_seed(1))
    rehearsal = rehearsed(model, text_loss, batch)
    changed = copy.deepcopy(model)
    changed.way = way
    (expected,) = run_plainly(changed, text_loss, [batch]).losses
    refused = []
    for boundary in rehearsal.possible_cuts:
        stages = cut(model, text_loss, rehearsal, [boundary])
        if when == "after a microbatch":
            stages.forward(batch)
        for part in stages.models:
            part.way = way
        try:
            loss = stages.forward(batch)[-1].loss
        except SplitError:
            refused.append(boundary)
        else:
            assert torch.equal(loss, expected)
    assert refused[0] == 1  # the first stage has but the embedding
    assert len(refused) < 5 or way in ("other order", "one less")  # other blocks: the cuts are not for them


class ReturnsNumber(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        return super().forward(x), float(x.detach().abs().mean())


class Scaled(Stack):
    """Layers return Python numbers that depend on the batch."""

    def __init__(self) -> None:
        super().__init__(ReturnsNumber)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h, number = layer(h)
            h = h * (1 + number)
        out: Tensor = self.head(h)
        return out


def test_a_number_that_a_block_computes_must_be_that_of_the_rehearsal() -> None:
    model = Scaled()
    one, other = (text(torch.Generator().manual_seed(seed)) for seed in (1, 2))
    rehearsal = rehearsed(model, text_loss, one)
    stages = cut(model, text_loss, rehearsal, [3])
    stages.forward(one)
    with pytest.raises(SplitError, match="must be a tensor"):
        stages.forward(other)


class Prunes(nn.Module):
    """How many rows leave the block depends on what they hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x[(x.detach().sum(-1) > 0)][: x.shape[0]]


def test_shapes_that_depend_on_values_are_found() -> None:
    class Pruning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Prunes()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Pruning()
    batches = [torch.randn(64, 8) for _ in range(2)]

    def fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum()

    rehearsal = rehearsed(model, fn, batches[0])
    stages = cut(model, fn, rehearsal, [1])
    stages.forward(batches[0])
    with pytest.raises(SplitError, match="in the rehearsal it was a tensor of shape"):
        stages.forward(batches[1])


def test_ranks_that_rehearsed_differently_find_out() -> None:
    torch.manual_seed(0)
    model = Changing()
    batch = text(torch.Generator().manual_seed(1))
    one = cut(model, text_loss, rehearsed(model, text_loss, batch), [3])
    model.way = "old value"
    other = cut(model, text_loss, rehearsed(model, text_loss, batch), [3])
    leaving = one.programs[0].forward(bound(text_loss, one.models[0]), batch, None, seed=7, divisor=1).leaving
    with pytest.raises(SplitError, match="do not take the same path"):
        other.programs[1].forward(bound(text_loss, other.models[1]), batch, leaving, seed=7, divisor=1)


def test_a_gradient_that_one_side_does_not_expect_is_found() -> None:
    model = Changing()
    batch = text(torch.Generator().manual_seed(1))
    rehearsal = rehearsed(model, text_loss, batch)
    stages = cut(model, text_loss, rehearsal, [3])
    leaving = stages.programs[0].forward(bound(text_loss, stages.models[0]), batch, None, seed=7, divisor=1).leaving
    frozen = dataclasses.replace(leaving, requires_grad=(False,))
    with pytest.raises(SplitError, match="has lost its graph"):
        stages.programs[1].forward(bound(text_loss, stages.models[1]), batch, frozen, seed=7, divisor=1)
    (key,) = rehearsal.boundaries[3].values
    values = {**rehearsal.values, key: dataclasses.replace(rehearsal.values[key], requires_grad=False)}
    wrong = cut(model, text_loss, dataclasses.replace(rehearsal, values=values), [3])
    with pytest.raises(SplitError, match="requires a gradient, unlike in the rehearsal"):
        wrong.forward(batch)
