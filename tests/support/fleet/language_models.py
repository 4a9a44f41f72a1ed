"""Small language models of three architectures on real text, as jobs."""

from __future__ import annotations

import pydoc_data.topics as topics
from functools import partial

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import hydra_ext
from hydra_ext import Job

LENGTH, ROWS, MICROBATCHES = 32, 2, 2
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
_COMMON = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def first() -> nn.Module:
    # Neither dropout nor tied weights: a pipeline would draw and add up other numbers than the plain loop.
    config = GPT2Config(
        vocab_size=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def second() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, intermediate_size=128, max_position_embeddings=LENGTH))


def third() -> nn.Module:
    config = GPTNeoXConfig(**_COMMON, intermediate_size=128, max_position_embeddings=LENGTH)
    return GPTNeoXForCausalLM(config)


MODELS = {"first": first, "second": second, "third": third}


def text(steps: int) -> list[list[Tensor]]:
    """Python's own help text, as bytes."""
    data = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
    size = ROWS * LENGTH
    microbatches = [data[i * size : (i + 1) * size].view(ROWS, LENGTH) for i in range(steps * MICROBATCHES)]
    return [microbatches[i : i + MICROBATCHES] for i in range(0, len(microbatches), MICROBATCHES)]


def held_out() -> list[Tensor]:
    return [each for step in text(60)[-3:] for each in step]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


def jobs(*, steps: int = 30, rates: tuple[float, ...] = RATES) -> list[Job]:
    return [
        Job(
            f"{name}-{rate:g}",
            model=build,
            optimizer=partial(hydra_ext.optim.AdamW, lr=rate),
            data=partial(text, steps),
            loss=loss,
            steps=steps,
            evaluate=held_out,
            max_norm=1.0,
        )
        for name, build in MODELS.items()
        for rate in rates
    ]
