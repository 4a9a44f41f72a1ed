"""The models that benchmarks train, and what they take."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
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


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def keep_freed_memory() -> None:
    """Freed memory stays with the process, so that neither side's time is that of page faults."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
