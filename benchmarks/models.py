"""The models that benchmarks train, and what they take."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    tokens: int


def make_model(size: Size) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=size.width // 64, n_positions=size.tokens,
        vocab_size=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_vgg(width: int) -> nn.Sequential:
    """VGG-16 with batch normalisation, ``width`` channels at first instead of 64, and one linear layer of ten classes.

    Channels last: else oneDNN copies what a convolution takes and gives into layouts of its own.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inside = 3
    for outside, convolutions in ((width, 2), (2 * width, 2), (4 * width, 3), (8 * width, 3), (8 * width, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))
    model.to(memory_format=torch.channels_last)
    return model


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def keep_freed_memory() -> None:
    """Freed memory stays with the process, so that neither side's time is that of page faults."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
