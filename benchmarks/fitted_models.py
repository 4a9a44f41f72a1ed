"""Small models of many families, whose smallest budgets are sought. Random weights of a seed, random batches.

AlexNet, OverFeat and GoogLeNet have the layers of vDNN (Rhu et al., MICRO 2016) with an eighth of the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, CLASSES = 256, 10
LESS = 8  # times the channels of the papers

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and its microbatches.

    Attributes:
        is_tuned_on: Whether the fitting of activations was developed with this model.
        layout: Of images and of the weights of convolutions; None for models without.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    is_tuned_on: bool = False
    layout: torch.memory_format | None = None

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().train()
        return model if self.layout is None else model.to(memory_format=self.layout)

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        batches = [self.batch(generator) for _ in range(count)]
        if self.layout is None:
            return batches
        return [
            {
                name: part.contiguous(memory_format=self.layout) if part.dim() == 4 else part
                for name, part in each.items()
            }
            for each in batches
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if "targets" not in batch:
            return model(**batch).loss
        output = model(batch["images"])
        if batch["targets"].is_floating_point():
            return functional.binary_cross_entropy_with_logits(output, batch["targets"])
        return functional.cross_entropy(output, batch["targets"])


# ---- batches --------------------------------------------------------------------------------------------------------
def _tokens(rows: int, length: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return draw


def _pairs(generator: torch.Generator) -> Batch:
    shape = (2, 96)
    return {
        "input_ids": torch.randint(3, VOCABULARY, shape, generator=generator),
        "labels": torch.randint(3, VOCABULARY, shape, generator=generator),
    }


def _sound(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(2, 80, 400, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (2, 48), generator=generator),
    }


def _images(rows: int, size: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        return {
            "images": torch.randn(rows, 3, size, size, generator=generator),
            "targets": torch.randint(0, CLASSES, (rows,), generator=generator),
        }

    return draw


def _labelled_pixels(rows: int, size: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
            "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
        }

    return draw


def _masks(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(1, 3, 96, 96, generator=generator),
        "targets": torch.rand(1, 1, 96, 96, generator=generator),
    }


# ---- transformers ---------------------------------------------------------------------------------------------------
def _library(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return build


_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip


def _adapted() -> nn.Module:
    """Adapters of rank 8 on a frozen Llama."""
    base = _library("LlamaForCausalLM", "LlamaConfig", **_LLAMA)()
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], lora_dropout=0.05)
    return peft.get_peft_model(base, config)


# ---- convolutions ---------------------------------------------------------------------------------------------------
class Vgg(nn.Module):
    """VGG-16 with a quarter of the channels and small linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for times, convolutions in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(inside, times * width, 3, padding=1), nn.ReLU(inplace=True)]
                inside = times * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(8 * width * 4, 256), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(256, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class TwoConvolutions(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers += [nn.Conv2d(channels, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.downs, self.ups, self.wider = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        channels = 3
        for level in range(depth):
            self.downs.append(TwoConvolutions(channels, width * 2**level))
            channels = width * 2**level
        self.pool = nn.MaxPool2d(2)
        self.middle = TwoConvolutions(channels, 2 * channels)
        channels *= 2
        for level in reversed(range(depth)):
            self.wider.append(nn.ConvTranspose2d(channels, width * 2**level, 2, 2))
            self.ups.append(TwoConvolutions(2 * width * 2**level, width * 2**level))
            channels = width * 2**level
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for wider, up in zip(self.wider, self.ups, strict=True):
            x = up(torch.cat([wider(x), skips.pop()], 1))
        return self.head(x)


def _convolution(inside: int, outside: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU(inplace=True)]


def _head(inside: int, widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths:
        layers += [nn.Dropout(), nn.Linear(inside, width // LESS), nn.ReLU(inplace=True)]
        inside = width // LESS
    return [*layers, nn.Linear(inside, 1000 // LESS)]


def _alexnet() -> nn.Module:
    first, second, third, last = (channels // LESS for channels in (96, 256, 384, 256))
    return nn.Sequential(
        *_convolution(3, first, 11, stride=4, padding=2), nn.MaxPool2d(3, 2),
        *_convolution(first, second, 5, padding=2), nn.MaxPool2d(3, 2),
        *_convolution(second, third, 3, padding=1),
        *_convolution(third, third, 3, padding=1),
        *_convolution(third, last, 3, padding=1), nn.MaxPool2d(3, 2),
        *_head(36 * last, (4096, 4096)),
    )  # fmt: skip


def _overfeat() -> nn.Module:
    """The fast one."""
    first, second, third, last = (channels // LESS for channels in (96, 256, 512, 1024))
    return nn.Sequential(
        *_convolution(3, first, 11, stride=4), nn.MaxPool2d(2),
        *_convolution(first, second, 5), nn.MaxPool2d(2),
        *_convolution(second, third, 3, padding=1),
        *_convolution(third, last, 3, padding=1),
        *_convolution(last, last, 3, padding=1), nn.MaxPool2d(2),
        *_head(36 * last, (3072, 4096)),
    )  # fmt: skip


class Inception(nn.Module):
    def __init__(self, inside: int, one: int, three: Sequence[int], five: Sequence[int], pooled: int) -> None:
        super().__init__()
        self.one = nn.Sequential(*_convolution(inside, one, 1))
        self.three = nn.Sequential(*_convolution(inside, three[0], 1), *_convolution(*three, 3, padding=1))
        self.five = nn.Sequential(*_convolution(inside, five[0], 1), *_convolution(*five, 5, padding=2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), *_convolution(inside, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


_INCEPTIONS = (  # of the paper: 1x1, 3x3 (reduced, out), 5x5 (reduced, out), pooled; 0 for a max-pool
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (),
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), (),
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip


def _googlenet() -> nn.Module:
    """Without the two heads at its side."""
    inside = 192 // LESS
    layers: list[nn.Module] = [
        *_convolution(3, 64 // LESS, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, 1),
        *_convolution(64 // LESS, 64 // LESS, 1), *_convolution(64 // LESS, inside, 3, padding=1),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    for channels in _INCEPTIONS:
        if not channels:
            layers.append(nn.MaxPool2d(3, 2, 1))
            continue
        one, reduced, three, narrow, five, pooled = (count // LESS for count in channels)
        layers.append(Inception(inside, one, (reduced, three), (narrow, five), pooled))
        inside = one + three + five + pooled
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(inside, 1000 // LESS)]
    return nn.Sequential(*layers)


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject(
            "GPT-2",
            _library(
                "GPT2LMHeadModel", "GPT2Config", n_layer=6, n_embd=256, n_head=8, n_positions=128,
                vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False,
            ),
            _tokens(2, 128),
            is_tuned_on=True,
        ),
        Subject("Llama", _library("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _tokens(2, 128)),
        Subject(
            "T5",
            _library(
                "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512,
                num_layers=3, num_decoder_layers=3, num_heads=4, decoder_start_token_id=0, use_cache=False,
            ),
            _pairs,
            is_tuned_on=True,
        ),
        Subject(
            "BERT",
            _library(
                "BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=4,
                num_attention_heads=4, intermediate_size=768, max_position_embeddings=128,
            ),
            _tokens(2, 128),
        ),
        Subject(
            "Whisper",
            _library(
                "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, d_model=128,
                encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=200, max_target_positions=64,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
            ),
            _sound,
        ),
        Subject(
            "ViT",
            _library(
                "ViTForImageClassification", "ViTConfig", image_size=96, patch_size=8, hidden_size=192,
                num_hidden_layers=4, num_attention_heads=4, intermediate_size=768, num_labels=CLASSES,
            ),
            _labelled_pixels(2, 96),
        ),
        Subject(
            "ResNet-50",
            _library(
                "ResNetForImageClassification", "ResNetConfig", embedding_size=16, hidden_sizes=[64, 128, 256, 512],
                depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=CLASSES,
            ),
            _labelled_pixels(4, 96),
            layout=torch.channels_last,
        ),
        Subject("VGG-16", Vgg, _images(8, 64), is_tuned_on=True, layout=torch.channels_last),
        Subject("U-Net", UNet, _masks, is_tuned_on=True, layout=torch.channels_last),
        Subject(
            "Mixtral",
            _library(
                "MixtralForCausalLM", "MixtralConfig", vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, num_local_experts=4,
                num_experts_per_tok=2, max_position_embeddings=128, use_cache=False,
            ),
            _tokens(2, 128),
        ),
        Subject("LoRA", _adapted, _tokens(2, 128)),
        Subject("AlexNet", _alexnet, _images(8, 224), layout=torch.channels_last),
        Subject("OverFeat", _overfeat, _images(8, 231), layout=torch.channels_last),
        Subject("GoogLeNet", _googlenet, _images(4, 224), layout=torch.channels_last),
    )
}  # fmt: skip
