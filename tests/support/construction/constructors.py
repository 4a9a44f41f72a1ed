"""Constructors that differ in how parameters get their numbers, and in what depends on these numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.models.unet import UNet

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def gpt2() -> nn.Module:
    """Makes a GPT-2 with tied weights."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=32)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def bf16_llama_from_config() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=True), dtype=torch.bfloat16
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)
    )


def bert() -> nn.Module:
    """Makes a BERT, whose embedding has a padding row."""
    small = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**small))


def vit() -> nn.Module:
    """Makes a ViT with truncated normal numbers, which are drawn again until all fit."""
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    return transformers.ViTModel(config)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    )


def resnet() -> nn.Module:
    """Makes a ResNet with batch norm: buffers, and Kaiming initialisation."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    return transformers.ResNetForImageClassification(config)


def encoder() -> nn.Module:
    """Makes an encoder whose layers are deep copies of one."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)


def recurrent() -> nn.Module:
    """Makes a recurrent model with weak references to parameters."""
    return nn.ModuleList([nn.LSTM(8, 8, num_layers=2), nn.GRU(8, 4)])


def initialised(initialise: Callable[[nn.Parameter], Any], *shape: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers = []
        for _ in range(3):
            layer = nn.Linear(8, 6)
            if shape:
                layer.weight = nn.Parameter(torch.empty(shape))
            initialise(layer.weight)
            layers.append(layer)
        return nn.Sequential(*layers)

    return build


def _scaled(weight: nn.Parameter) -> None:
    weight.data.normal_()
    weight.data /= weight.data.norm(dim=0)
    weight.data[weight.data < 0] *= 2
    weight.data[3].zero_()


def _from_numpy(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(torch.from_numpy(np.random.randn(*weight.shape)))
        weight.mul_(random.random())


def in_another_dtype() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(torch.bfloat16)


def reparametrised(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[wrap(nn.Linear(6, 6)) for _ in range(3)])


class Target(nn.Module):
    """Has a copy of a part, made after the part, and a part that receives another part's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.mixed = nn.Linear(4, 4)
        with torch.no_grad():
            self.mixed.weight.add_(self.online[0].weight)
            self.mixed.bias.copy_(self.target[1].weight[0])


class FromNumbers(nn.Module):
    """Has buffers, a branch, a shape and an attribute that depend on parameters' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("norm", self.first.weight.detach().norm())
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.count = int((self.first.weight > 0).sum())
        self.third = nn.Linear(4, 1 + self.count)
        self.scale: Tensor = self.second.weight.detach().abs().max()


class Replaced(nn.Module):
    """Has parameters from random numbers, replaced, in lists and dictionaries, by data, in loops, with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.weight = nn.Parameter(torch.randn(3, 4).t(), requires_grad=False)
        self.weight.partition = "columns"
        self.rows = nn.ParameterList([nn.Parameter(torch.rand(5)) for _ in range(3)])
        self.by_name = nn.ParameterDict({"a": torch.randn(2), "b": nn.Parameter(torch.zeros(0))})
        for width in (2, 3):
            self.add_module(f"layer{width}", nn.Linear(width, width))
        self.layer2.weight.data = torch.randn(2, 2) * 3
        flat = torch.randn(10)
        self.left, self.right = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        self.again = self.left
        self.constant = nn.Parameter(torch.tensor([1.0, 2.0]))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.a = nn.Parameter(torch.empty(6).normal_(generator=generator))
        self.b = nn.Parameter(torch.rand(6, generator=generator))


class Swallowing(nn.Module):
    """Swallows all errors; a branch depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sign = 0
        try:
            self.sign = 1 if self.first.weight.sum() > 0 else -1
        except:  # noqa: E722
            self.third = nn.Linear(9, 9)


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bf16 llama": bf16_llama_from_config,
    "t5": t5,
    "bert": bert,
    "vit": vit,
    "mixtral": mixtral,
    "resnet": resnet,
    "unet": UNet,
    "encoder": encoder,
    "recurrent": recurrent,
    "kaiming": initialised(nn.init.kaiming_normal_),
    "xavier": initialised(nn.init.xavier_uniform_),
    "orthogonal": initialised(nn.init.orthogonal_),
    "truncated": initialised(nn.init.trunc_normal_),
    "truncated far": initialised(lambda weight: nn.init.trunc_normal_(weight, 0.0, 1.0, 1.5, 3.0)),
    "sparse": initialised(lambda weight: nn.init.sparse_(weight, 0.3)),
    "eye": initialised(nn.init.eye_),
    "dirac": initialised(nn.init.dirac_, 4, 4, 3),
    "scaled": initialised(_scaled),
    "numpy": initialised(_from_numpy),
    "another dtype": in_another_dtype,
    "weight norm": reparametrised(parametrizations.weight_norm),
    "spectral norm": reparametrised(parametrizations.spectral_norm),
    "orthogonal map": reparametrised(parametrizations.orthogonal),
    "target": Target,
    "from numbers": FromNumbers,
    "replaced": Replaced,
    "own generator": OwnGenerator,
    "swallowing": Swallowing,
}
