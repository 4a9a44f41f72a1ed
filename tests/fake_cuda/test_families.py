"""Whole models on the fake GPU: nothing they make on the way is on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from support.fake_cuda import DEVICE, fake_cuda


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config).eval()


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4
    )
    return ViTModel(config).eval()


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).train()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (bert, {"input_ids": torch.ones(2, 5, dtype=torch.int64)}),
        (bert, {"input_ids": torch.ones(2, 5, dtype=torch.int64), "attention_mask": torch.ones(2, 5)}),
        (vit, {"pixel_values": torch.ones(2, 3, 16, 16)}),
        (encoder, {"src": torch.ones(2, 5, 16)}),
    ],
    ids=["bert", "bert_with_a_mask", "vit", "encoder"],
)
def test_everything_is_on_the_device(make: object, inputs: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = make()  # type: ignore[operator]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    with fake_cuda(model, budget=parameters // 2 + sum(b.nbytes for b in model.buffers()) + 2**12) as run:
        for _ in range(2):
            out = model(**inputs)
        assert (out if isinstance(out, torch.Tensor) else out.last_hidden_state).device == DEVICE
        assert run.report().evictions > 0
