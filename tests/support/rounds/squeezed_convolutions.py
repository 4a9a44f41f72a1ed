"""Tiny convolutional networks as torchvision builds them. They are written out, since it is not a dependency."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def _convolved(inside: int, outside: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(16, 48, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(96, 64, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(64 * 16, 128), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class Fire(nn.Module):
    def __init__(self, inside: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inside, squeezed, 1)
        self.one = nn.Conv2d(squeezed, expanded, 1)
        self.three = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.squeeze(x))
        return torch.cat([functional.relu(self.one(x)), functional.relu(self.three(x))], 1)


class SqueezeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            Fire(32, 16, 32), Fire(64, 16, 32), nn.MaxPool2d(3, 2), Fire(64, 24, 64), Fire(128, 32, 64),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(128, 10, 1), nn.AdaptiveAvgPool2d(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images)).flatten(1)


class DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.BatchNorm2d(inside), nn.ReLU(), nn.Conv2d(inside, 4 * growth, 1, bias=False))
        self.grow = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.grow(self.narrow(torch.cat(features, 1)))


class DenseNet(nn.Module):
    def __init__(self, growth: int = 12) -> None:
        super().__init__()
        self.stem = _convolved(3, 24, 3, stride=2)
        self.first = nn.ModuleList(DenseLayer(24 + i * growth, growth) for i in range(4))
        self.between = nn.Sequential(_convolved(24 + 4 * growth, 36, 1), nn.AvgPool2d(2))
        self.second = nn.ModuleList(DenseLayer(36 + i * growth, growth) for i in range(4))
        self.head = nn.Linear(36 + 4 * growth, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.between(self._dense(self.first, self.stem(images)))
        return self.head(self._dense(self.second, x).mean((2, 3)))

    def _dense(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        features = [x]
        for layer in layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Inception(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.one = _convolved(inside, width, 1)
        self.three = nn.Sequential(_convolved(inside, width, 1), _convolved(width, 2 * width, 3))
        self.five = nn.Sequential(_convolved(inside, width // 2, 1), _convolved(width // 2, width, 3))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _convolved(inside, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class GoogLeNet(nn.Module):
    """A network with an auxiliary head, whose loss has a smaller weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolved(3, 16, 7, stride=2), nn.MaxPool2d(3, 2, 1), _convolved(16, 32, 3))
        self.low = nn.Sequential(Inception(32, 16), Inception(80, 24))
        self.high = nn.Sequential(nn.MaxPool2d(3, 2, 1), Inception(120, 24), Inception(120, 32))
        self.aside = nn.Sequential(_convolved(120, 16, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(160, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.low(self.stem(images))
        aside = self.aside(x)
        return self.head(self.high(x).mean((2, 3))) + 0.3 * aside


class ShuffleUnit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            _convolved(half, half, 1),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            _convolved(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        x = torch.cat([kept, self.branch(changed)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolved(3, 48, 3, stride=2), nn.MaxPool2d(3, 2, 1))
        self.units = nn.Sequential(*(ShuffleUnit(48) for _ in range(4)), _convolved(48, 96, 1))
        self.deep = nn.Sequential(nn.MaxPool2d(2), *(ShuffleUnit(96) for _ in range(4)), _convolved(96, 192, 1))
        self.head = nn.Linear(192, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.deep(self.units(self.stem(images))).mean((2, 3)))


class Excited(nn.Module):
    """An inverted bottleneck whose channels are weighted by means over the whole map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True))
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.weigh = nn.Sequential(nn.Conv2d(wide, 8, 1), nn.SiLU(), nn.Conv2d(8, wide, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        y = self.project(y * self.weigh(y.mean((2, 3), keepdim=True)))
        if self.training:  # stochastic depth, by sample
            y = y * (torch.rand(len(y), 1, 1, 1) < 0.9) / 0.9
        return x + y


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolved(3, 24, 3, stride=2)
        self.layers = nn.Sequential(Excited(24), Excited(24), _convolved(24, 40, 3, stride=2), Excited(40), Excited(40))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(40, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


class DeepLab(nn.Module):
    """A network with parallel dilated convolutions, and a loss for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolved(3, 24, 3, stride=2), _convolved(24, 48, 3, stride=2), _convolved(48, 48, 3)
        )
        self.dilated = nn.ModuleList(nn.Conv2d(48, 24, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))
        self.pooled = nn.Conv2d(48, 24, 1)
        self.project = _convolved(96, 48, 1)
        self.classify = nn.Conv2d(48, 6, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        whole = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        x = self.project(torch.cat([*(layer(x) for layer in self.dilated), whole], 1))
        return functional.interpolate(self.classify(x), scale_factor=4.0, mode="bilinear")


class MnasNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (24, 32, 48, 64)
        self.stem = _convolved(3, widths[0], 3, stride=2)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    _convolved(a, 3 * a, 1),
                    _convolved(3 * a, 3 * a, 5, stride=2, groups=3 * a),
                    nn.Conv2d(3 * a, b, 1, bias=False),
                    nn.BatchNorm2d(b, momentum=0.01),
                )
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Sequential(_convolved(widths[-1], 160, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(160, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.head(self.layers(self.stem(images))))
