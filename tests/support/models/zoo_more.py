"""More families, for the ways in which a round could go wrong.

Library models with experts, recurrences, sliding windows, two towers and batch statistics; and small ones of our own
whose ways of passing values around are unusual.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from support.models.zoo import VOCABULARY, Batch, Family

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 2, 9)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def _pairs(generator: torch.Generator) -> Any:
    return {
        "input_ids": _tokens(generator, 2, 9),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "return_loss": True,
    }


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=8))


def _tied_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SMALL, num_key_value_heads=2, tie_word_embeddings=True, attention_dropout=0.1)
    )


def _mistral() -> nn.Module:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**_SMALL, num_key_value_heads=2, sliding_window=4)
    )


def _gemma3() -> nn.Module:
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**_SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4)
    )


def _albert() -> nn.Module:
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_SMALL, embedding_size=16))


def _bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_layerdrop=0.2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    )


def _qwen2_moe() -> nn.Module:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **_SMALL,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            decoder_sparse_step=1,
            router_aux_loss_coef=0.1,
            output_router_logits=True,
        )
    )


def _mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=3)
    )


def _rwkv() -> nn.Module:
    return transformers.RwkvForCausalLM(
        transformers.RwkvConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            attention_hidden_size=32,
            intermediate_size=48,
            context_length=32,
        )
    )


def _jamba() -> nn.Module:
    return transformers.JambaForCausalLM(
        transformers.JambaConfig(
            **_SMALL,
            num_key_value_heads=2,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=4,
            mamba_dt_rank=4,
        )
    )


def _clip() -> nn.Module:
    text = {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "projection_dim": 16}
    text |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = {**_TOWER, "image_size": 16, "patch_size": 8, "projection_dim": 16}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 12, 16], depths=[2, 2, 2], layer_type="basic", num_labels=5
        )
    )


# ---- our own --------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Residual(nn.Module):
    """Residual stream, a skip from the start, learned scales and operations in place, all outside the layers; tied."""

    def __init__(self, width: int = 32, depth: int = 4, layer: type[Mlp] = Mlp) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([layer(width) for _ in range(depth)])
        self.scales = nn.Parameter(torch.rand(depth, 2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = first = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            x = self.scales[index, 0] * x + self.scales[index, 1] * first
            h = layer(functional.rms_norm(x, x.shape[-1:]))
            h += x
            x = h
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Noisy(Mlp):
    """Stores a loss, a mask without history and a count on itself."""

    aux: Tensor
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = (2 * y).square().mean()
        self.mask = x.detach().mean(-1, keepdim=True) > 0
        self.calls += 1
        return y


class Auxiliary(Residual):
    """Reads attributes of its layers at the end."""

    def __init__(self) -> None:
        super().__init__(layer=Noisy)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels)
        for layer in self.layers:
            loss = loss + 0.1 * layer.aux + 0.01 * layer.mask.float().mean()
        return loss


class Dynamic(Residual):
    """The batch decides the number, order and repetition of its layers."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for step in range(int(input_ids[0, 0]) % 6):
            x = x + self.layers[int(input_ids[0, step]) % len(self.layers)](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """Tokens choose their expert, so microbatches take different paths."""

    def __init__(self, width: int = 16, experts: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.routers = nn.ModuleList([nn.Linear(width, experts) for _ in range(depth)])
        self.experts = nn.ModuleList([nn.ModuleList([Mlp(width) for _ in range(experts)]) for _ in range(depth)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids[:, :3]).flatten(0, 1)
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights = router(x).softmax(-1)
            chosen = weights.argmax(-1)
            y = torch.zeros_like(x)
            for number in chosen.unique().tolist():
                tokens = (chosen == number).nonzero()[:, 0]
                part = experts[number](x[tokens]) * weights[tokens, number, None]
                y = y.index_add(0, tokens, part.to(y.dtype))
            x = x + y
        return functional.cross_entropy(self.head(x), labels[:, :3].flatten())


class Normed(nn.Module):
    """A network with batch statistics, and with weights whose spectral norm is estimated in buffers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 12, 16)
        self.convolutions = nn.ModuleList(
            [
                torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 3, 2, 1))
                for a, b in itertools.pairwise(widths)
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(b) for b in widths[1:]])
        self.head = nn.Linear(16, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = pixel_values
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = functional.relu(norm(convolution(x)), inplace=True)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


MORE_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3", _qwen3, _text),
        Family("tied_llama", _tied_llama, _text),
        Family("mistral", _mistral, _text),
        Family("gemma3", _gemma3, _text),
        Family("albert", _albert, _text),
        Family("bart", _bart, _text),
        Family("qwen2_moe", _qwen2_moe, _text),
        Family("mamba", _mamba, _text),
        Family("rwkv", _rwkv, _text),
        Family("jamba", _jamba, _text),
        Family("clip", _clip, _pairs),
        Family("resnet", _resnet, _images),
        Family("residual", Residual, _text),
        Family("auxiliary", Auxiliary, _text),
        Family("dynamic", Dynamic, _text),
        Family("experts", Experts, _text),
        Family("normed", Normed, _images),
    )
}
