"""A small U-Net of our own with skip connections: convolutions, normalisation, up- and down-sampling."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class ConvBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Predicts a number for each pixel: ``forward(pixels, targets)`` returns the mean squared error.

    The up path uses tensors of the down path: the first block's output is last used in the last operation but one.
    """

    def __init__(self, channels: tuple[int, ...] = (16, 24, 32)) -> None:
        super().__init__()
        self.checkpointing: str | None = None  # "reentrant" or "plain"
        widths = (3, *channels)
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in pairwise(widths))
        self.middle = ConvBlock(channels[-1], channels[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(width, width, 2, stride=2) for width in reversed(channels))
        after = [*reversed(channels[:-1]), channels[0]]
        self.merge = nn.ModuleList(
            ConvBlock(2 * width, narrower) for width, narrower in zip(reversed(channels), after, strict=True)
        )
        self.head = nn.Conv2d(channels[0], 3, 1)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        reentrant = self.checkpointing == "reentrant"
        if self.checkpointing is None or not torch.is_grad_enabled() or (reentrant and not x.requires_grad):
            return block(x)
        return checkpoint(block, x, use_reentrant=reentrant)

    def forward(self, pixels: Tensor, targets: Tensor) -> Tensor:
        skips = []
        x = pixels
        for block in self.down:
            x = self._run(block, x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self._run(self.middle, x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = self._run(merge, torch.cat((up(x), skips.pop()), dim=1))
        return F.mse_loss(self.head(x), targets)
