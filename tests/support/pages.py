"""Small models and data for the examples of README.md and docs/, imported by the pages' hidden setups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

POSITIONS = 16
VOCABULARY = 256


def gpt2(layers: int = 2, width: int = 32, **config: Any) -> nn.Module:
    """Makes a GPT-2 without dropout, with the random numbers of seed 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": POSITIONS}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**{**sizes, **no_dropout, **tokens, **config}))
    return model


def token_batches(n: int = 4, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (batch, POSITIONS), generator=generator) for _ in range(n)]


def microbatches(n: int = 4, batch: int = 2) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in token_batches(n, batch)]


def mlp(width: int = 64, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def conv_net() -> nn.Sequential:
    """Makes a network with feature maps of eight channels that returns one number for each image."""
    torch.manual_seed(0)
    maps = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*maps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


def images(n: int = 2, size: int = 32) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def weights_folder(path: str | Path, model: Any) -> Path:
    """Makes a folder like those of ``save_pretrained``."""
    model.save_pretrained(path)
    return Path(path)
