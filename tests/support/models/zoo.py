"""Tiny models of eight families with random weights, and their inputs.

Every family has several blocks, dropout if its library has it, and steps of a few milliseconds. Nothing is
downloaded. A model and its batches depend only on a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.generation import GenerationMixin

from support.models.unet import UNet

Batch = dict[str, Tensor]
VOCABULARY = 96


@dataclass(frozen=True)
class Family:
    """A way to build one kind of model.

    Attributes:
        build: Makes the model from the present random state.
        batch: Draws one batch from the generator.
        prompt: The part of a batch that text is generated from; None for models that generate no text.
        adapters: Names of the modules that get low-rank adapters.
        encodes_first: Whether generation runs an encoder outside of the model's own call.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    prompt: Callable[[Batch], Batch] | None = None
    adapters: tuple[str, ...] = ()
    encodes_first: bool = False

    def make(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().train()

    def batches(self, seed: int, count: int = 20) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        output = model(**batch)
        return output if isinstance(output, Tensor) else output.loss

    def generate(self, model: nn.Module, batch: Batch) -> Tensor:
        """Generates a few greedy tokens after the batch's prompt."""
        if self.prompt is None:
            raise ValueError(f"{self.name} generates no text")
        inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        # The library's general loop: some classes have one of their own that expects half a minute of sound.
        return GenerationMixin.generate(inner, **self.prompt(batch), max_new_tokens=5, do_sample=False)

    def set_checkpointing(self, model: nn.Module, *, reentrant: bool) -> None:
        if isinstance(model, UNet):
            model.checkpointing = "reentrant" if reentrant else "plain"
        else:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _causal_batch(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 2, 24)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _causal_prompt(batch: Batch) -> Batch:
    tokens = batch["input_ids"][:, :6]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1
    )
    config.pad_token_id = 2
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=64,
            intermediate_size=160,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            pad_token_id=2,
        )
    )


def _mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            num_hidden_layers=3,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            pad_token_id=2,
        )
    )


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=4,
            hidden_size=64,
            intermediate_size=256,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
        )
    )


def _bert_batch(generator: torch.Generator) -> Batch:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 18:] = 0
    return {"input_ids": _tokens(generator, 2, 24), "attention_mask": mask, "labels": _tokens(generator, 2, 24)}


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=3,
            num_decoder_layers=3,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_heads=4,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        )
    )


def _t5_batch(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator, 2, 20), "labels": _tokens(generator, 2, 12)}


def _t5_prompt(batch: Batch) -> Batch:
    return {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=4,
            hidden_size=64,
            intermediate_size=256,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=10,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def _vit_batch(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 10, (2,), generator=generator),
    }


def _whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            encoder_layers=2,
            decoder_layers=3,
            d_model=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=256,
            decoder_ffn_dim=256,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
            vocab_size=VOCABULARY,
            dropout=0.1,
            pad_token_id=2,
            bos_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def _whisper_batch(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(2, 8, 32, generator=generator),
        "labels": _tokens(generator, 2, 12),
    }


def _whisper_prompt(batch: Batch) -> Batch:
    return {"input_features": batch["input_features"]}


def _unet_batch(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"pixels": pixels, "targets": pixels.flip(1).clone()}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpt2", _gpt2, _causal_batch, _causal_prompt, ("c_attn", "c_fc")),
        Family("llama", _llama, _causal_batch, _causal_prompt, ("q_proj", "v_proj", "down_proj")),
        Family("t5", _t5, _t5_batch, _t5_prompt, ("q", "v", "wo"), encodes_first=True),
        Family("bert", _bert, _bert_batch, None, ("query", "value")),
        Family("vit", _vit, _vit_batch, None, ("q_proj", "v_proj")),
        Family("mixtral", _mixtral, _causal_batch, _causal_prompt, ("q_proj", "v_proj")),
        Family("whisper", _whisper, _whisper_batch, _whisper_prompt, ("q_proj", "fc1"), encodes_first=True),
        Family("unet", UNet, _unet_batch, None, ("first", "head")),
    )
}
