"""What modules hold is put back as it was, and belongs to the stage that left it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError, UnsupportedModel
from hydra_ext.pipeline import Pipeline
from hydra_ext.split import is_absent
from hydra_ext.state.module_state import ModuleState
from support.pipeline.pipelines import sgd
from support.split.split_models import Batch
from support.split.split_models_own import Stack, text, text_loss
from support.split.stateful_models import COUNTERS, CountsInLayer

BATCH = text(torch.Generator().manual_seed(1))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 1
        self.tensor = torch.zeros(2)
        self.members = [torch.zeros(2), "text"]
        self.named = {"one": torch.zeros(2)}
        self.register_buffer("counted", torch.zeros(2))


def test_everything_that_a_module_holds_is_put_back() -> None:
    model = Holder()
    tensor, counted, members = model.tensor, model.counted, model.members
    before = ModuleState.now([model]).copied(apart=is_absent)
    model.number, model.more = 2, "new"  # type: ignore[assignment]
    model.members.append("more")
    for written in (model.tensor, model.counted, model.members[0], model.named["one"]):
        written.add_(1)  # type: ignore[union-attr]
    after = ModuleState.now([model])
    before.put()
    assert model.number == 1
    assert not hasattr(model, "more")
    assert model.members is members
    assert len(model.members) == 2
    for put_back in (model.tensor, model.counted, model.members[0], model.named["one"]):
        assert torch.equal(put_back, torch.zeros(2))  # type: ignore[arg-type]
    after.put()
    assert model.tensor is tensor
    assert model.counted is counted
    assert (model.number, model.more, len(model.members)) == (2, "new", 3)
    assert torch.equal(model.named["one"], torch.ones(2))


def test_only_what_was_changed_is_told() -> None:
    model = Holder()
    before = ModuleState.now([model])
    assert ModuleState.now([model]).changed_since(before) == []
    model.members[0].add_(1)  # type: ignore[union-attr]
    model.number = 3
    after = ModuleState.now([model])
    changed = [(after.entries[place].owner, place[2]) for place in after.changed_since(before)]
    assert len(changed) == 2
    assert any(owner is model and name == "number" for owner, name in changed)
    assert any(owner is model.members for owner, _ in changed)


def test_a_graph_is_not_kept_and_nothing_goes_back_through_it_unseen() -> None:
    model = Holder()
    weight = torch.ones(2, requires_grad=True)
    model.tensor = weight * 2
    before = ModuleState.now([model]).copied(apart=is_absent)
    before.put()
    model.tensor.sum().backward()  # it is there still, with its graph
    assert weight.grad is not None
    model.tensor = torch.zeros(2)
    before.put()
    assert torch.equal(model.tensor, torch.full((2,), 2.0))
    with pytest.raises(SplitError, match="detach"):
        model.tensor.sum().backward()


def train(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Two stages in this process."""
    with Pipeline(model, sgd, schedule="gpipe", stages=2, cuts=["layers.2"], microbatches=1, seed=5) as pipe:
        for batch in batches:
            pipe.step([batch], lambda batch: text_loss(model, batch))


class Decays(Stack):
    """Writes to a weight after its first layer, and reads it only there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        with torch.no_grad():
            self.scale.mul_(0.9)
        h = h * self.scale
        for layer in self.layers[1:]:
            h = layer(h)
        out: Tensor = self.head(h)
        return out


def test_a_weight_that_several_stages_of_a_rank_would_write_to_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"'scale'.*as many ranks as stages"):
        train(Decays(), [BATCH])


class CountsLongTexts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("long", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 6:
            self.long += 1
        out: Tensor = super().forward(x) * (1 + self.long)
        return out


def test_a_later_kind_of_microbatch_that_writes_to_more_is_refused() -> None:
    short: Batch = {name: tensor[:, :5] for name, tensor in BATCH.items()}
    train(CountsLongTexts(), [short, short])
    with pytest.raises(SplitError, match="writes to long between blocks, unlike"):
        train(CountsLongTexts(), [short, BATCH])


# ---- counters wherever a module may have them ------------------------------------------------------------------------
class CountsBefore(Stack):
    """In each layer, and before the first."""

    def __init__(self, name: str) -> None:
        super().__init__(CountsInLayer)
        make, self.count = COUNTERS[name]
        self.counter = make()
        for layer in self.layers:
            layer.counter, layer.count = make(), self.count

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.count(self.counter)
        h = self.embed(x) / scale
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("name", COUNTERS)
def test_each_stage_and_each_second_forward_counts_from_where_it_should(name: str) -> None:
    batches = [text(torch.Generator().manual_seed(seed)) for seed in range(4)]
    found = {}
    for way, options in {
        "whole": {"stages": 1},
        "again": {"stages": 1, "recompute": True},
        "two": {"stages": 2, "cuts": ["layers.2"], "schedule": "interleaved"},
    }.items():
        torch.manual_seed(0)
        model = CountsBefore(name)
        options = {"schedule": "1f1b", **options}
        with Pipeline(model, sgd, microbatches=2, seed=5, **options) as pipe:  # type: ignore[arg-type]
            losses = [pipe.step(batches[i : i + 2], lambda batch, m=model: text_loss(m, batch)).losses for i in (0, 2)]  # type: ignore[misc]
        found[way] = torch.stack([loss for step in losses for loss in step])
    assert torch.equal(found["again"], found["whole"])
    assert torch.equal(found["two"], found["whole"])
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(text_loss(CountsBefore(name), batches[0]), found["whole"][0])
