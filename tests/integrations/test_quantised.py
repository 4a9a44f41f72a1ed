"""Adapters on quantised bases (QLoRA), beside the same quantised model without offload.

The libraries are installed for the full tests only; `runtime/test_composites.py` has weights like theirs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import hydra_ext
from hydra_ext.integrations.transformers import HydraTrainer
from hydra_ext.state.composites import inner_tensors
from support.benches import assert_same
from support.runtime.outcomes import POISONED
from support.trainers import arguments, hydra, outcome, samples

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

BUDGET = 700_000  # of 1.2 MB of packed weights, or 0.8 MB with 4 bits
OF_INT8 = 1_200_000  # graphs of bitsandbytes' 8-bit layers keep inputs where no hook on saved tensors sees them


def torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTISED = {
    "torchao int8": torchao_int8,
    "bitsandbytes nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    "bitsandbytes nf4, twice": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes fp4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def adapted(base: Path, kind: str, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=QUANTISED[kind](), dtype=torch.bfloat16, device_map="cpu"
    )
    torch.manual_seed(1)
    chosen = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **options})
    return peft.get_peft_model(model, chosen).train()


def trained(model: Any, budget: int | None = None) -> list[torch.Tensor]:
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    found = []

    def loop() -> None:
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(0, 128, (2, 16))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
        with torch.no_grad():
            found.append(model(input_ids=ids).logits)

    if budget is None:
        loop()
    else:
        inner = [tensor for each in model.parameters() for tensor in inner_tensors(each).values()]
        assert sum(tensor.nbytes for tensor in inner) > budget
        device = hydra_ext.SimulatedDevice(poison=True, asynchronous=True, seed=0)
        with hydra_ext.offload(model, optimizer, budget=budget, device=device, checks=POISONED) as run:
            loop()
            assert run.layout.composites
            assert run.report().evictions > 0
    return [*found, *(parameter.detach().clone() for parameter in adapters)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", QUANTISED)
def test_adapters_on_a_quantised_base_have_the_bits_of_the_same_model(kind: str, dropout: float, base: Path) -> None:
    expected = trained(adapted(base, kind, lora_dropout=dropout))
    budget = OF_INT8 if kind == "bitsandbytes int8" else BUDGET
    assert_same(expected, trained(adapted(base, kind, lora_dropout=dropout), budget))


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_a_trainer_trains_adapters_on_a_quantised_base(kind: str, base: Path, tmp_path: Path) -> None:
    from transformers import Trainer

    data = [{name: value % 128 for name, value in each.items()} for each in samples(0, 4)]
    plain = Trainer(adapted(base, kind), arguments(tmp_path / "plain"), train_dataset=data)
    plain.train()
    ours = HydraTrainer(
        adapted(base, kind), arguments(tmp_path / "ours"), train_dataset=data, hydra=hydra(budget=BUDGET)
    )
    ours.train()
    found = [each for each in outcome(plain) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    assert len(found) > 4
    adapters = [[p.detach() for p in each.model.parameters() if p.requires_grad] for each in (plain, ours)]
    assert_same(*adapters)
    losses = [
        [torch.tensor(entry["loss"]) for entry in each.state.log_history if "loss" in entry] for each in (plain, ours)
    ]
    assert_same(*losses)


def test_a_base_of_8_bits_works_before_and_after_the_context(base: Path) -> None:
    ids = torch.arange(16)[None]
    model = adapted(base, "bitsandbytes int8").eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with hydra_ext.offload(model, budget=OF_INT8, checks=POISONED):
            inside = model(input_ids=ids).logits
        copied = copy.deepcopy(model)
        assert_same([expected] * 3, [inside, model(input_ids=ids).logits, copied(input_ids=ids).logits])


@pytest.mark.parametrize("unmerges", [False, True])
def test_a_base_of_8_bits_keeps_its_scales_when_adapters_are_merged_inside(unmerges: bool, base: Path) -> None:
    """Merging replaces the weight, whose first forward moves the scales to the module."""
    ids = torch.arange(16)[None]

    def merged(model: Any) -> list[torch.Tensor]:
        model.merge_adapter()
        found = [model(input_ids=ids).logits]
        if unmerges:
            model.unmerge_adapter()
            found.append(model(input_ids=ids).logits)
        return found

    plain, model = (adapted(base, "bitsandbytes int8").eval() for _ in range(2))
    with torch.no_grad():
        expected = [*merged(plain), plain(input_ids=ids).logits]
        with hydra_ext.offload(model, budget=OF_INT8, checks=POISONED):
            found = merged(model)
        assert_same(expected, [*found, model(input_ids=ids).logits])


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_base_is_saved_and_loaded(kind: str, base: Path, tmp_path: Path) -> None:
    model = adapted(base, kind)
    inner = [tensor for each in model.parameters() for tensor in inner_tensors(each).values()]
    before = [tensor.detach().clone() for tensor in inner]
    with hydra_ext.offload(model, budget=OF_INT8, checks=POISONED) as run:
        run.save(tmp_path)
    with torch.no_grad():
        for tensor in inner:
            tensor.zero_()
    with hydra_ext.offload(model, budget=OF_INT8, checks=POISONED) as run:
        assert run.load(tmp_path) is not None
    assert_same(before, inner)
