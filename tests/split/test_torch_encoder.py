"""torch's own encoder without gradients: it takes the way in stages that it takes as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.errors import SplitError
from hydra_ext.split import keep_own_part
from support.split.split_models import VOCABULARY, tokens
from support.split.split_stages import Stages, cut, rehearsed


class Encoder(nn.Module):
    """Its embedding may be frozen: then torch asks the weights of the first layer whether they are trained."""

    def __init__(self, *, nested: bool = True, frozen: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.embed.weight.requires_grad_(not frozen)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=nested)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(x), src_key_padding_mask=padding))
        return out


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["padding"]).flatten(0, 1), batch["y"].flatten())


def batch(*, padded: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    padding = torch.arange(12) >= torch.tensor([[12], [8]])
    return {"x": tokens(generator, 2, 12), "y": tokens(generator, 2, 12), "padding": padding if padded else None}


def trained(model: nn.Module, given: dict[str, Any]) -> Stages:
    """Two stages that have been rehearsed in training."""
    return cut(model, loss, rehearsed(model, loss, given), [3])


@pytest.mark.parametrize(("nested", "padded"), [(True, False), (False, True)])
def test_an_evaluation_gives_what_the_encoder_gives(nested: bool, padded: bool) -> None:
    torch.manual_seed(0)
    model, given = Encoder(nested=nested), batch(padded=padded)
    stages = trained(model, given)
    for each in (model, *stages.models):
        each.eval()
    with torch.no_grad():
        expected = loss(model, given)
        for _ in range(2):  # watched and not
            assert torch.equal(stages.forward(given)[-1].loss, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_between_layers_are_refused_with_what_to_do() -> None:
    model, given = Encoder(), batch(padded=True)
    stages = trained(model, given)
    for each in stages.models:
        each.eval()
    with torch.no_grad(), pytest.raises(SplitError, match="enable_nested_tensor=False"):
        stages.forward(given)


def test_absent_weights_say_whether_they_are_trained() -> None:
    """With a gradient the encoder makes no nested tensors, and it looks at the weights for that."""
    torch.manual_seed(0)
    model, given = Encoder(frozen=True).eval(), batch(padded=True)
    expected = loss(model, given)
    rehearsal = rehearsed(model, loss, given)
    stages = cut(model, loss, rehearsal, [3])
    assert torch.equal(stages.forward(given)[-1].loss, expected)
    keep_own_part(model, rehearsal, [(3, len(rehearsal.events))])
    assert rehearsed(model, loss, given).digest == rehearsal.digest


def test_torch_answers_as_ever_afterwards() -> None:
    model, given = Encoder(), batch(padded=True)
    before = torch.overrides.has_torch_function
    stages = trained(model, given)
    stages.backward(stages.forward(given))
    assert torch.overrides.has_torch_function is before
