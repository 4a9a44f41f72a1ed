"""More models of our own to cut into stages: other architectures."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from support.split.split_models import VOCABULARY, Batch, Subject
from support.split.split_models_own import Layer, picture_loss, pictures, text, text_loss


class Recurrent(nn.Module):
    """A model whose layers pass on a state beside their output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(nn.LSTM(32, 32, batch_first=True) for _ in range(4))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        state = None
        for layer in self.layers:
            h, state = layer(h, state)
        out: Tensor = self.head(h)
        return out


class Translator(nn.Module):
    """A model of torch's own encoder and decoder."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, 32)
        self.target = nn.Embedding(VOCABULARY, 32)
        self.core = nn.Transformer(32, 4, 3, 3, 48, dropout, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.head(self.core(self.source(x), self.target(x), tgt_mask=mask))
        return out


class MixerLayer(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.along = nn.Sequential(nn.Linear(places, 24), nn.GELU(), nn.Linear(24, places))
        self.across = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.along(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.across(self.norms[1](x))
        return out


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.layers = nn.Sequential(*(MixerLayer(16, 24) for _ in range(4)))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.patches(x).flatten(2).transpose(1, 2))).mean(1))
        return out


class TimedBlock(nn.Module):
    """A residual convolution with a time embedding as input, and attention over the positions."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, inner)
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(32, outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)
        self.way = nn.Conv2d(inner, outer, 1)
        self.attention = nn.MultiheadAttention(outer, 2, batch_first=True)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        h = self.second(F.silu(h)) + self.way(x)
        places = h.flatten(2).transpose(1, 2)
        places = places + self.attention(places, places, places, need_weights=False)[0]
        return places.transpose(1, 2).reshape(h.shape)


class Denoiser(nn.Module):
    """Predicts added noise, which it draws before the first block. It has skips, and all blocks read a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(8, 12), TimedBlock(12, 16)])
        self.middle = TimedBlock(16, 16)
        self.up = nn.ModuleList([TimedBlock(32, 12), TimedBlock(24, 8)])
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(torch.arange(8) * (-math.log(1000.0) / 8))
        embedded = self.time(torch.cat((waves.sin(), waves.cos()), 1))
        h = self.stem(x)
        skips = []
        for block in self.down:
            h = block(h, embedded)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle(h, embedded)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2.0)
            h = block(torch.cat((h, skips.pop()), 1), embedded)
        out: Tensor = self.head(h)
        return out


def denoising(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    return {"x": pixels, "time": torch.rand(2, generator=generator) * 100}


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    noise = torch.randn_like(batch["x"])
    share = (batch["time"] / 100)[:, None, None, None]
    return F.mse_loss(model((1 - share) * batch["x"] + share * noise, batch["time"]), noise)


class Squeeze(nn.Module):
    """An inverted bottleneck whose channels are weighted."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 2 * inner
        self.expand = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.weigh = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.expand(x))
        h = self.project(h * self.weigh(h))
        return x + h if self.residual else h


class Mobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.blocks = nn.Sequential(Squeeze(8, 8, 1), Squeeze(8, 12, 2), Squeeze(12, 12, 1), Squeeze(12, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class Dense(nn.Module):
    """Every block reads the results of all blocks before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(4))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(F.relu(torch.cat(found, 1))))
        out: Tensor = self.head(torch.cat(found, 1).mean((2, 3)))
        return out


class Spectral(nn.Module):
    """A network with weights whose spectral norm is estimated in buffers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        channels = ((3, 8), (8, 12), (12, 16))
        self.layers = nn.ModuleList(spectral_norm(nn.Conv2d(a, b, 3, 2, 1)) for a, b in channels)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in channels)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)), inplace=True)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Hybrid(nn.Module):
    """A model with layers of several classes in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        kinds = (Layer(), nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True), Layer())
        self.layers = nn.ModuleList(kinds)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        out: Tensor = self.head(h)
        return out


MORE: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("recurrent", Recurrent, text, text_loss),
        Subject("translator", lambda: Translator(0.0), text, text_loss),
        Subject("translator_dropout", lambda: Translator(0.1), text, text_loss, random=True),
        Subject("mixer", Mixer, pictures, picture_loss),
        Subject("denoiser", Denoiser, denoising, denoising_loss, random=True),
        Subject("mobile", Mobile, pictures, picture_loss),
        Subject("spectral", Spectral, pictures, picture_loss),
        Subject("hybrid", Hybrid, text, text_loss),
        Subject("dense", Dense, pictures, picture_loss),
    )
}
