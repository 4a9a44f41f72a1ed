"""Kinds of microbatch: told apart by what they hold, and so many are remembered."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.errors import SplitError
from hydra_ext.split.kinds import KINDS_KEPT
from hydra_ext.split.signature import signature_of
from hydra_ext.split.stages.stage import _with_own_written
from hydra_ext.split.state.lasting import Lasting
from hydra_ext.state.arguments import own_copy
from support.split.split_models import Batch
from support.split.split_models_more import Dense
from support.split.split_models_own import Stack, picture_loss, pictures, text, text_loss
from support.split.split_side_effects import (
    Encoding,
    Example,
    encoded,
    encoded_loss,
    example,
    example_loss,
)
from support.split.split_stages import assert_same, cut, rehearsed, run, run_plainly


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [text(generator) for _ in range(count)]


@pytest.mark.full
def test_so_many_kinds_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Stack()
    (batch,) = batches(1)
    (expected,) = run_plainly(model, text_loss, [batch]).losses
    calls = 0

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return text_loss(model, batch)

    stages = cut(model, fn, rehearsed(model, fn, {**batch, "step": 0}), [3])
    for step in (*range(KINDS_KEPT), 0, KINDS_KEPT):
        assert torch.equal(stages.forward({**batch, "step": step})[-1].loss, expected)
    assert "make it a tensor" in caplog.text
    assert [len(program._rehearsals) for program in stages.programs] == [KINDS_KEPT] * 2
    calls = 0
    stages.forward({**batch, "step": 0})  # was used lately
    assert calls == 2
    stages.forward({**batch, "step": 1})  # was not, and is rehearsed again
    assert calls == 6


@pytest.mark.parametrize(("made", "fn"), [(encoded, encoded_loss), (example, example_loss)])
def test_what_mappings_and_dataclasses_hold_tells_the_kind(made: Any, fn: Any) -> None:
    torch.manual_seed(0)
    model = Stack()
    one, other = batches(2)
    several = [made(one), made({name: tensor[:, :5] for name, tensor in other.items()})]
    rehearsal = rehearsed(model, fn, several[0])
    assert_same(run(model, fn, several, [3], rehearsal), run_plainly(model, fn, several))


@pytest.mark.parametrize("made", [encoded, example])
def test_copies_of_mappings_and_dataclasses_have_memory_of_their_own(made: Any) -> None:
    (batch,) = batches(1)
    microbatch = made(batch)
    before = copy.deepcopy(microbatch)
    places = []
    other = own_copy(microbatch, lambda tensor, place: places.append((tensor, place)))
    assert type(other) is type(microbatch)
    assert len(places) == len({place for _, place in places}) == 2
    for tensor, _ in places:
        tensor.zero_()
    assert torch.equal(_x(other), torch.zeros_like(_x(other)))
    assert torch.equal(_x(microbatch), _x(before))


def _x(held: Encoding | Example) -> Tensor:
    return held.x if isinstance(held, Example) else held["x"]


def test_a_mapping_within_the_microbatch_is_looked_into() -> None:
    torch.manual_seed(0)
    model = Stack()

    def fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]["x"]).flatten(0, 1), batch[0]["y"].flatten())

    one, other = batches(2)
    several = [[encoded(one)], [encoded({name: tensor[:1] for name, tensor in other.items()})]]
    rehearsal = rehearsed(model, fn, several[0])
    assert_same(run(model, fn, several, [3], rehearsal), run_plainly(model, fn, several))


def test_pictures_may_lie_in_another_order_than_those_before() -> None:
    torch.manual_seed(0)
    model = Dense()
    generator = torch.Generator().manual_seed(1)
    several = [pictures(generator) for _ in range(3)]
    for batch in several[1:]:
        batch["x"] = batch["x"].contiguous(memory_format=torch.channels_last)
    rehearsal = rehearsed(model, picture_loss, several[0])
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    for cut_at in rehearsal.possible_cuts:
        assert_same(run(model, picture_loss, several, [cut_at], rehearsal), run_plainly(model, picture_loss, several))


def test_tensors_that_share_memory_are_another_kind_than_those_that_do_not() -> None:
    """What a block writes to one of them is carried on only where the rehearsal has seen it in the other."""
    both = torch.randn(2, 9)
    views = {"x": both[:, :-1], "y": both[:, 1:]}
    apart = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in views.items()}
    one = dict.fromkeys(("x", "y"), both[:, :-1])
    kinds = [signature_of(nn.Module(), len, each) for each in (views, apart, one, copy.deepcopy(views))]
    assert kinds[0] == kinds[3]
    assert len({kind[1] for kind in kinds}) == 3  # type: ignore[index]


def test_a_gradient_is_not_lost_where_stages_of_one_rank_share_what_is_written_to() -> None:
    rehearsal = SimpleNamespace(lasting=Lasting(frozenset({("input", "['y']")})))
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(SplitError, match=r"memory of the microbatch's \['x'\], which requires a gradient"):
        _with_own_written({"x": x, "y": x.detach()[1:]}, rehearsal)  # type: ignore[arg-type]
    y = torch.zeros(3)
    made = _with_own_written({"x": x, "y": y, "z": y[1:]}, rehearsal)  # type: ignore[arg-type]
    assert made["x"] is x
    made["y"].fill_(1)
    assert made["z"].tolist() == [1, 1]
    assert y.tolist() == [0, 0, 0]
