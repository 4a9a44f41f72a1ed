"""Twenty-four further architectures, tiny and with random weights, for the smallest budgets that train them.

They were chosen before any of them was run: sixteen of transformers, and eight as in torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from support.rounds import squeezed_convolutions as convolutions

VOCABULARY = 256


@dataclass(frozen=True)
class Subject:
    """A model and its inputs."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(count)]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if "targets" not in batch:
            return model(**batch).loss
        return functional.cross_entropy(model(batch["images"]), batch["targets"])


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 48), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _pixels(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(2, 3, 64, 64, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 10, (2,), generator=generator)}


def _segmented(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(2, 3, 64, 64, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 6, (2, 64, 64), generator=generator)}


def _sound(generator: torch.Generator) -> dict[str, Tensor]:
    sound = torch.randn(2, 4000, generator=generator)
    return {"input_values": sound, "labels": torch.randint(0, 2, (2,), generator=generator)}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(4, 3, 64, 64, generator=generator)
    return {"images": images, "targets": torch.randint(0, 10, (4,), generator=generator)}


def _maps(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(4, 3, 64, 64, generator=generator)
    return {"images": images, "targets": torch.randint(0, 6, (4, 64, 64), generator=generator)}


def _library(name: str, model: str, config: str, batch: Callable[[torch.Generator], Any], **options: Any) -> Subject:
    def build() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return Subject(name, build, batch)


_WIDE = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}

SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        _library(
            "gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", _text, hidden_size=96, num_layers=4, num_heads=4,
            attention_types=[[["global", "local"], 2]], window_size=16, **_TEXT,
        ),
        _library(
            "codegen", "CodeGenForCausalLM", "CodeGenConfig", _text, vocab_size=VOCABULARY, n_positions=64, n_ctx=64,
            n_embd=96, n_layer=4, n_head=4, rotary_dim=16, bos_token_id=0, eos_token_id=0,
        ),
        _library("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _text, **_WIDE, **_TEXT, pad_token_id=0),
        _library("stablelm", "StableLmForCausalLM", "StableLmConfig", _text, **_WIDE, **_TEXT, num_key_value_heads=4),
        _library("granite", "GraniteForCausalLM", "GraniteConfig", _text, **_WIDE, **_TEXT),
        _library(
            "gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", _text, vocab_size=VOCABULARY, n_positions=64,
            n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
        ),
        _library(
            "xlnet", "XLNetLMHeadModel", "XLNetConfig", _text, vocab_size=VOCABULARY, d_model=96, n_layer=4, n_head=4,
            d_inner=256,
        ),
        _library("mpnet", "MPNetForMaskedLM", "MPNetConfig", _text, **_WIDE, **_TEXT),
        _library("fnet", "FNetForMaskedLM", "FNetConfig", _text, hidden_size=96, num_hidden_layers=4,
                 intermediate_size=256, **_TEXT),
        _library(
            "pegasus", "PegasusForConditionalGeneration", "PegasusConfig", _text, d_model=96, encoder_layers=3,
            decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
            decoder_ffn_dim=256, **_TEXT,
        ),
        _library(
            "switch_transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", _text,
            vocab_size=VOCABULARY, d_model=96, d_kv=24, d_ff=192, num_layers=4, num_decoder_layers=4, num_heads=4,
            num_experts=4, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, decoder_start_token_id=0,
        ),
        _library(
            "segformer", "SegformerForSemanticSegmentation", "SegformerConfig", _segmented, num_labels=6,
            hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4],
            decoder_hidden_size=48,
        ),
        _library(
            "poolformer", "PoolFormerForImageClassification", "PoolFormerConfig", _pixels, num_labels=10,
            hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 2, 1],
        ),
        _library(
            "regnet", "RegNetForImageClassification", "RegNetConfig", _pixels, num_labels=10, embedding_size=16,
            hidden_sizes=[24, 48, 96, 144], depths=[1, 1, 2, 1], groups_width=24,
        ),
        _library(
            "dinov2", "Dinov2ForImageClassification", "Dinov2Config", _pixels, num_labels=10, image_size=64,
            patch_size=8, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, drop_path_rate=0.1,
        ),
        _library(
            "hubert", "HubertForSequenceClassification", "HubertConfig", _sound, hidden_size=96, num_hidden_layers=3,
            num_attention_heads=4, intermediate_size=256, conv_dim=(32, 32, 32), conv_stride=(5, 4, 4),
            conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
            classifier_proj_size=32, apply_spec_augment=False,
        ),
        Subject("alexnet", convolutions.AlexNet, _images),
        Subject("squeezenet", convolutions.SqueezeNet, _images),
        Subject("densenet", convolutions.DenseNet, _images),
        Subject("googlenet", convolutions.GoogLeNet, _images),
        Subject("shufflenet", convolutions.ShuffleNet, _images),
        Subject("efficientnet", convolutions.EfficientNet, _images),
        Subject("deeplab", convolutions.DeepLab, _maps),
        Subject("mnasnet", convolutions.MnasNet, _images),
    )
}  # fmt: skip
