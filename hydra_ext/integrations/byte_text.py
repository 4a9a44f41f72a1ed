"""A real transformer on real text, without a download: a byte-level GPT-2 and the help texts that ship with Python."""

from __future__ import annotations

import pydoc_data.topics as topics
from typing import Any, cast

import torch
from torch import nn

NAME = "A GPT-2"
REQUIRES = ("transformers",)


def help_text() -> bytes:
    """The English help text of Python's own documentation, about 700 KB."""
    return "\n".join(text for _, text in sorted(topics.topics.items())).encode()


def batches(*, count: int, rows: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """``count`` random pieces of the text: token ids of shape (rows, length), dtype int64."""
    text = torch.frombuffer(bytearray(help_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (count, rows), generator=generator, device="cpu")
    return [torch.stack([text[start : start + length] for start in row.tolist()]) for row in starts]


def model(*, layers: int, width: int, length: int, seed: int = 0) -> nn.Module:
    """A GPT-2 over bytes with random weights, built as always."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(1, width // 64),
        n_positions=length,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    built: Any = GPT2LMHeadModel(config)
    built.loss_type = "ForCausalLM"  # transformers would guess it, with a warning
    return cast(nn.Module, built)


def loss_of(model: nn.Module, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, labels=ids, use_cache=False).loss
