"""Convolutional networks of three shapes, all with batch statistics, whose blocks have numbers for names.

They are a residual network with downsampling and dropout, a plain chain with activations in place like VGG's, and a
U-Net.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.models.zoo import Batch, Family
from support.split.split_models_own import ResNet
from support.split.split_models_own import UNet as UNetWithBatchNorm

CLASSES = 10


class Classifier(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(pixels), labels)


class Chain(nn.Module):
    """Pairs of convolutions with activations in place and pooling, and two linear layers with dropout at the end."""

    def __init__(self) -> None:
        super().__init__()
        stages = [
            nn.Sequential(
                nn.Conv2d(inner, outer, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.Conv2d(outer, outer, 3, padding=1),
                nn.BatchNorm2d(outer),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            )
            for inner, outer in ((3, 8), (8, 16), (16, 24))
        ]
        self.stages = nn.Sequential(*stages)
        self.first = nn.Linear(24 * 16, 64)
        self.second = nn.Linear(64, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.first(self.stages(pixels).flatten(1)), inplace=True)
        return self.second(F.dropout(x, 0.5, self.training))  # type: ignore[no-any-return]


def _batch(generator: torch.Generator) -> Batch:
    return {
        "pixels": torch.randn(3, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, CLASSES, (3,), generator=generator),
    }


def _family(name: str, network: Callable[[], nn.Module]) -> Family:
    return Family(name, lambda: Classifier(network()), _batch)


PICTURES: dict[str, Family] = {
    family.name: family
    for family in (
        _family("resnet", lambda: ResNet(dropout=0.3)),
        _family("chain", Chain),
        _family("unet_batch_norm", UNetWithBatchNorm),
    )
}
