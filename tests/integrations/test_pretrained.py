"""Models from files in one line, beside those of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hydra_ext
from hydra_ext.errors import InvalidArgument, MissingDependency, UnsupportedModel, WeightsError
from support.benches import assert_same
from support.windows.window_subjects import batch, tiny_gpt2

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
BERT = BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA)


def numbers(model: Any) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *(buffer for _, buffer in model.named_buffers())]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_gpt2, llama])
@pytest.mark.parametrize("auto", [True, False])
def test_numbers_dtypes_and_outputs_are_those_of_transformers(
    auto: bool, make: Any, saved_as: torch.dtype, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    make().to(saved_as).save_pretrained(tmp_path)
    cls: Any = AutoModelForCausalLM if auto else type(make())
    plain = cls.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    before = torch.get_rng_state()
    model: Any = hydra_ext.from_pretrained(tmp_path, cls, dtype=dtype)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (type(model), model.training, model.dtype) == (type(plain), plain.training, plain.dtype)
    budget = sum(parameter.nbytes for parameter in plain.parameters()) // 2 + 2**16
    with hydra_ext.offload(model, budget=budget) as run, torch.no_grad():
        assert_same([plain(batch(0)).logits], [model(batch(0)).logits])
        assert run.report().evictions > 0
    assert_same(numbers(plain), numbers(model))


def test_files_of_the_model_below_the_head_and_above_it_are_found(tmp_path: Path, caplog: Any) -> None:
    whole = tiny_gpt2()
    whole.transformer.save_pretrained(tmp_path / "below")
    model: Any = hydra_ext.from_pretrained(tmp_path / "below", GPT2LMHeadModel)
    with hydra_ext.offload(model, budget=2**24):
        assert_same(numbers(whole), numbers(model))
    headed = llama()
    headed.save_pretrained(tmp_path / "above")
    with caplog.at_level(logging.WARNING):
        inner: Any = hydra_ext.from_pretrained(tmp_path / "above", type(headed.model))
    assert "has tensors that a LlamaModel does not have: lm_head.weight" in caplog.text
    with hydra_ext.offload(inner, budget=2**24):
        assert_same(numbers(headed.model), numbers(inner))


def test_masks_of_older_files_are_left_out(tmp_path: Path, caplog: Any) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        model: Any = hydra_ext.from_pretrained(tmp_path, GPT2Model)
    assert "attn.bias" not in caplog.text
    assert isinstance(model, GPT2Model)


def test_a_head_that_is_in_no_file_is_told(tmp_path: Path) -> None:
    BertForMaskedLM(BERT).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"has no tensor bert\.pooler\.dense\.weight, which the model has"):
        hydra_ext.from_pretrained(tmp_path, BertForSequenceClassification)


def test_a_model_that_keeps_parts_in_fp32_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, vocab_size=64)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"keeps wo in float32 beside torch.float16"):
        hydra_ext.from_pretrained(tmp_path, T5ForConditionalGeneration, dtype=torch.float16)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="are quantised"):
        hydra_ext.from_pretrained(tmp_path, LlamaForCausalLM)


def test_without_a_dtype_in_the_configuration_it_is_that_of_the_weights(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for dtype in (None, "auto"):
        assert hydra_ext.from_pretrained(tmp_path, LlamaForCausalLM, dtype=dtype).dtype is torch.bfloat16
    assert hydra_ext.from_pretrained(tmp_path, LlamaForCausalLM, dtype="float16").dtype is torch.float16


def test_options_that_the_configuration_does_not_have_are_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match=r"from_pretrained\(device_map=\): a LlamaConfig has no such option"):
        hydra_ext.from_pretrained(tmp_path, LlamaForCausalLM, device_map="auto")
    with pytest.raises(InvalidArgument, match="give a floating dtype"):
        hydra_ext.from_pretrained(tmp_path, LlamaForCausalLM, dtype="int8")
    model: Any = hydra_ext.from_pretrained(tmp_path, LlamaForCausalLM, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_a_transformers_that_is_too_old_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "4.30.0")
    with pytest.raises(MissingDependency, match=r"needs transformers 4\.56, and 4\.30\.0 is installed"):
        hydra_ext.from_pretrained(tmp_path, GPT2Model)
