"""Library models to cut into stages: tiny, with random weights, and without dropout unless a model says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Any]
VOCABULARY = 64
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def output_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True)
class Subject:
    """A model, its inputs and its outputs.

    Attributes:
        random: Whether it draws random numbers as it runs.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    fn: Callable[[nn.Module, Batch], Any] = output_loss
    random: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batches(self, count: int, seed: int = 1) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]


def all_states_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch, output_hidden_states=True)
    loss: Tensor = output.loss + sum(state.pow(2).mean() for state in output.hidden_states)
    return loss


def all_attentions_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch, output_attentions=True)
    loss: Tensor = output.loss + sum(attention.pow(2).mean() for attention in output.attentions)
    return loss


def last_attention_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch, output_attentions=True)
    loss: Tensor = output.loss + output.attentions[-1].pow(2).mean()
    return loss


def tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def causal(generator: torch.Generator) -> Batch:
    ids = tokens(generator, 2, 12)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def cached(generator: torch.Generator) -> Batch:
    return {**causal(generator), "use_cache": True}


def masked(generator: torch.Generator) -> Batch:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    return {**causal(generator), "attention_mask": mask}


def _words(generator: torch.Generator) -> Batch:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return {"input_ids": tokens(generator, 2, 12), "labels": tokens(generator, 2, 12), "attention_mask": mask}


def _pair(generator: torch.Generator) -> Batch:
    return {**_words(generator), "labels": tokens(generator, 2, 9)}


def _pictures(generator: torch.Generator, size: int = 32) -> Batch:
    pixels = torch.randn(2, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}


def _large_pictures(generator: torch.Generator) -> Batch:
    return _pictures(generator, 64)


def _sound(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": tokens(generator, 2, 9)}


def _clip_batch(generator: torch.Generator) -> Batch:
    ids = tokens(generator, 2, 12)
    return {"input_ids": ids, "pixel_values": _pictures(generator)["pixel_values"], "return_loss": True}


def _gpt2(dropout: float) -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


def _mixtral(router_loss: bool) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_GROUPED, **experts, output_router_logits=router_loss)
    )


def _qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**_GROUPED, **experts, head_dim=8, output_router_logits=True)
    )


def _t5(dropout: float) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **sizes, vocab_size=VOCABULARY, dropout_rate=dropout, decoder_start_token_id=0, use_cache=False
        )
    )


_ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
    "use_cache": False,
}


def _whisper() -> nn.Module:
    positions = {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**_ENCODER_DECODER, **positions, suppress_tokens=[], begin_suppress_tokens=[])
    )


def _bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**_ENCODER_DECODER, max_position_embeddings=32)
    )


def _marian() -> nn.Module:
    return transformers.MarianMTModel(transformers.MarianConfig(**_ENCODER_DECODER, max_position_embeddings=32))


def _resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [2, 2, 2, 2]}
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(**sizes, layer_type="basic", num_labels=5)
    )


def _vit() -> nn.Module:
    sizes = {key: value for key, value in _SMALL.items() if key not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **_NO_DROPOUT, image_size=32, patch_size=8, num_labels=5)
    )


def _swin() -> nn.Module:
    sizes = {"embed_dim": 8, "depths": [2, 2, 2], "num_heads": [2, 2, 4], "window_size": 4}
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(**sizes, **_NO_DROPOUT, image_size=32, patch_size=2, drop_path_rate=0.0, num_labels=5)
    )


def _convnext() -> nn.Module:
    sizes = {"hidden_sizes": [8, 16, 24], "depths": [1, 2, 1], "num_stages": 3}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes, num_labels=5))


def _mobilenet() -> nn.Module:
    return transformers.MobileNetV2ForImageClassification(
        transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=64, num_labels=5, classifier_dropout_prob=0.0)
    )


def _clip() -> nn.Module:
    text = {**_SMALL, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = {k: v for k, v in _SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}
    vision |= {"image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _gemma2() -> nn.Module:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=6, attention_dropout=0.0)
    )


def _gpt_neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SMALL))


def _opt() -> nn.Module:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **sizes, vocab_size=VOCABULARY, max_position_embeddings=32, dropout=0.0, word_embed_proj_dim=32
        )
    )


def _bloom() -> nn.Module:
    sizes = {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


def _falcon() -> nn.Module:
    sizes = {key: value for key, value in _SMALL.items() if key != "intermediate_size"}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))


def _phi() -> nn.Module:
    return transformers.PhiForCausalLM(transformers.PhiConfig(**_SMALL))


def _distilbert() -> nn.Module:
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "vocab_size": VOCABULARY}
    return transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0, max_position_embeddings=32)
    )


def _eager_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_E, attn_implementation="eager"))


_E = {**_SMALL, **_NO_DROPOUT}
_GQA = {**_GROUPED}


def _of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Returns a class of the library and its configuration by name, because some are slow to import."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


LIBRARY: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("gpt2", lambda: _gpt2(0.0), causal),
        Subject("gpt2_dropout", lambda: _gpt2(0.1), causal, random=True),
        Subject("llama", _of("LlamaForCausalLM", "LlamaConfig", **_GQA), causal),
        Subject("llama_mask", _of("LlamaForCausalLM", "LlamaConfig", **_GQA), masked),
        Subject("mistral", _of("MistralForCausalLM", "MistralConfig", **_GQA, sliding_window=6), causal),
        Subject("qwen2", _of("Qwen2ForCausalLM", "Qwen2Config", **_GQA, tie_word_embeddings=True), masked),
        Subject("qwen3", _of("Qwen3ForCausalLM", "Qwen3Config", **_GQA, head_dim=8), causal),
        Subject("mixtral", lambda: _mixtral(False), causal),
        Subject("mixtral_router", lambda: _mixtral(True), causal),
        Subject("qwen3_moe_router", _qwen3_moe, causal),
        Subject("bert", _of("BertForMaskedLM", "BertConfig", **_E), _words),
        Subject("bert_attentions", _eager_bert, _words, all_attentions_loss),
        Subject("bert_last_attention", _eager_bert, _words, last_attention_loss),
        Subject("llama_states", _of("LlamaForCausalLM", "LlamaConfig", **_GQA), causal, all_states_loss),
        Subject("llama_cache", _of("LlamaForCausalLM", "LlamaConfig", **_GQA), cached),
        Subject("t5", lambda: _t5(0.0), _pair),
        Subject("t5_dropout", lambda: _t5(0.1), _pair, random=True),
        Subject("vit", _vit, _pictures),
        Subject("whisper", _whisper, _sound),
        Subject("resnet_library", _resnet, _large_pictures),
        Subject("gpt_neox", _gpt_neox, causal),
        Subject("opt", _opt, masked),
        Subject("bloom", _bloom, causal),
        Subject("falcon", _falcon, causal),
        Subject("phi", _phi, causal),
        Subject("gemma2", _gemma2, causal),
        Subject("distilbert", _distilbert, _words),
        Subject("roberta", _of("RobertaForMaskedLM", "RobertaConfig", **_E), _words),
        Subject("electra", _of("ElectraForMaskedLM", "ElectraConfig", **_E, embedding_size=32), _words),
        Subject("deberta", _of("DebertaV2ForMaskedLM", "DebertaV2Config", **_E, relative_attention=True), _words),
        Subject("albert", _of("AlbertForMaskedLM", "AlbertConfig", **_E, embedding_size=16), _words),
        Subject("bart", _bart, _pair),
        Subject("marian", _marian, _pair),
        Subject("clip", _clip, _clip_batch),
        Subject("swin", _swin, _pictures),
        Subject("convnext", _convnext, _large_pictures),
        Subject("mobilenet", _mobilenet, _large_pictures),
    )
}
