"""Which modules are blocks: a model that is one long chain is cut within it, whatever its members are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.split import find_blocks
from support.split.split_models import Batch
from support.split.split_models_own import Layer, Stack, picture_loss, pictures, text, text_loss
from support.split.split_stages import assert_same, rehearsed, run, run_plainly

BATCHES = [pictures(torch.Generator().manual_seed(seed)) for seed in (1, 2)]


class Plain(nn.Module):
    """Convolutions with activations in place between them, and a classifier of two layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((3, 8), (8, 8), (8, 16), (16, 16)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4))
        self.classifier = nn.Sequential(nn.Linear(256, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


class Convolution(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU6())


class Inverted(nn.Module):
    """Holds a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(8, 32, 1), nn.Conv2d(32, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.convolutions(x)
        return out


class Residual(nn.Module):
    """The chain is of several classes, and lies in a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        members = (Convolution(3, 8), *(Inverted() for _ in range(4)), Convolution(8, 16))
        self.backbone.features = nn.Sequential(*members)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.backbone.features(x).mean((2, 3)))
        return out


class Dense(nn.ModuleDict):
    """Each layer sees what all before it gave."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__({f"layer{i}": nn.Conv2d(width + 4 * i, 4, 3, padding=1) for i in range(depth)})

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.values():
            seen.append(layer(torch.cat(seen, 1)).relu())
        return torch.cat(seen, 1)


class DenselyConnected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = Dense(4, 2), Dense(12, 4)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), first, second)
        self.classifier = nn.Linear(28, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return out


CHAINS: dict[str, tuple[type[nn.Module], list[str]]] = {
    "plain": (Plain, [*(f"features.{i}" for i in (0, 2, 4, 6)), "classifier.0", "classifier.2"]),
    "residual": (Residual, [*(f"backbone.features.{i}" for i in range(6)), "classifier"]),
    "densely connected": (
        DenselyConnected,
        [*(f"features.{i}" for i in range(3)), *(f"features.3.layer{i}" for i in range(4)), "classifier"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_large_chain_is_opened_and_cut_anywhere(name: str) -> None:
    torch.manual_seed(0)
    model = CHAINS[name][0]()
    assert list(find_blocks(model)) == CHAINS[name][1]
    rehearsal = rehearsed(model, picture_loss, BATCHES[0])
    assert rehearsal.possible_cuts == list(range(1, len(rehearsal.events)))
    expected = run_plainly(model, picture_loss, BATCHES)
    for boundary in rehearsal.possible_cuts:
        assert_same(run(model, picture_loss, BATCHES, [boundary], rehearsal), expected)


class ChainedLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(self.up, nn.GELU(), self.down)


def test_a_small_chain_stays_in_its_block() -> None:
    assert list(find_blocks(Stack(ChainedLayer))) == ["embed", *(f"layers.{i}" for i in range(4)), "head"]


def test_a_chain_of_one_piece_is_no_chain() -> None:
    model = nn.Module()
    model.head = nn.Sequential(nn.Dropout(), nn.Linear(8, 8))
    assert list(find_blocks(model)) == ["head"]


def test_what_only_holds_modules_is_no_block() -> None:
    class Namespace(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.Module()
            self.held.norm = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.held.norm(self.embed(x))
            for layer in self.layers:
                h = layer(h)
            out: Tensor = self.head(h)
            return out

    batch: Batch = text(torch.Generator().manual_seed(1))
    assert "held.norm" in [event.name for event in rehearsed(Namespace(), text_loss, batch).events]
