"""Adapters around a base from files that never lies in memory as a whole, beside peft around an ordinary base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from hydra_ext.integrations.peft import get_peft_model
from support.benches import assert_same, tight_budget
from support.runtime.outcomes import POISONED
from support.windows.window_subjects import language_loss, tiny_gpt2

CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    "lora with dropout": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True),
    "a head that is trained whole": lambda: peft.LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True
    ),
    "biases that are trained, too": lambda: peft.LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, bias="all", use_rslora=True
    ),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_modules=["c_attn"], fan_in_fan_out=True, total_step=10),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}

# Adapters that are computed from weights of the base.
FROM_WEIGHTS: dict[str, Any] = {
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True),
    "pissa": lambda: peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights="pissa"),
    "norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["ln_1", "ln_2"]),
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, trainable_token_indices=[1, 2]
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_gpt2().save_pretrained(folder)
    return folder


def trained(model: Any, *, budget: int | None) -> list[torch.Tensor]:
    """Losses, and the adapters' numbers before and after."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = [parameter.detach().clone() for parameter in adapters]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)

    def loop() -> None:
        for step in range(3):
            torch.manual_seed(step)
            loss = language_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())

    if budget is None:
        loop()
    else:
        with hydra_ext.offload(model, optimizer, budget=budget, checks=POISONED) as run:
            loop()
            assert run.report().evictions > 0
    return [*found, *(parameter.detach().clone() for parameter in adapters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_around_a_base_from_files_have_the_bits_of_peft(kind: str, dtype: torch.dtype, base: Path) -> None:
    plain = GPT2LMHeadModel.from_pretrained(base, dtype=dtype).train()
    torch.manual_seed(1)
    expected = trained(peft.get_peft_model(plain, CONFIGS[kind]()), budget=None)
    config = GPT2Config.from_pretrained(base)
    model = hydra_ext.materialize(lambda: GPT2LMHeadModel(config).to(dtype), weights=base, cast=True).train()
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(1)
    around = get_peft_model(model, CONFIGS[kind]())
    assert any(parameter.is_meta for parameter in around.parameters())
    found = trained(around, budget=tight_budget(tiny_gpt2(), language_loss) * dtype.itemsize // 6)
    assert_same(expected, found)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("kind", FROM_WEIGHTS)
def test_adapters_that_are_computed_from_weights_need_a_base_with_weights(kind: str, base: Path) -> None:
    plain = GPT2LMHeadModel.from_pretrained(base).train()
    torch.manual_seed(1)
    expected = trained(peft.get_peft_model(plain, FROM_WEIGHTS[kind]()), budget=None)
    model = GPT2LMHeadModel.from_pretrained(base).train()
    torch.manual_seed(1)
    assert_same(expected, trained(get_peft_model(model, FROM_WEIGHTS[kind]()), budget=600_000))
    config = GPT2Config.from_pretrained(base)
    without = hydra_ext.materialize(lambda: GPT2LMHeadModel(config), weights=base)
    with pytest.raises(UnsupportedModel, match=r"adapters of this \w+Config are computed from the base's weights"):
        get_peft_model(without, FROM_WEIGHTS[kind]())
