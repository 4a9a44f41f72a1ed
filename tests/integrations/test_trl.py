"""trl's Trainers with the mixin, beside trl's own. trl is installed for the full tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hydra_ext.integrations.transformers import HydraArguments, HydraMixin
from support.benches import assert_same
from support.runtime.outcomes import POISONED
from support.trainers import outcome

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
BUDGET = "14MiB"  # trl's losses have buffers of 11 MiB, and the weights take 38


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)


def tokenizer() -> PreTrainedTokenizerFast:
    letters = {chr(code): code - 32 for code in range(32, 127)}
    pieces = Tokenizer(models.BPE(vocab={**letters, "<e>": len(letters)}, merges=[], unk_token="<e>"))
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<e>", pad_token="<e>", unk_token="<e>")


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=12, n_embd=256, n_head=4, n_positions=64, vocab_size=96, bos_token_id=95, eos_token_id=95
    )
    return GPT2LMHeadModel(config)


def supervised() -> tuple[Any, Any, Any, dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = ["hello world this is", "another line of text", "the third one", "and a fourth"] * 2
    return SFTTrainer, SFTConfig, Dataset.from_dict({"text": texts}), {}


def preferences() -> tuple[Any, Any, Any, dict[str, Any]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = {"prompt": ["a question "] * 8, "chosen": ["good answer"] * 8, "rejected": ["bad"] * 8}
    return DPOTrainer, DPOConfig, Dataset.from_dict(pairs), {"ref_model": model().eval()}


@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize("of", [supervised, preferences])
def test_the_mixin_has_the_bits_of_trl(of: Any, accumulates: int, tmp_path: Path) -> None:
    outcomes = []
    for offloads in (False, True):
        trainer_of, config_of, data, more = of()
        args = config_of(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulates,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        kind = type("Hydra", (HydraMixin, trainer_of), {}) if offloads else trainer_of
        if offloads:
            more = {**more, "hydra": HydraArguments(budget=BUDGET, others={"checks": POISONED})}
        trainer = kind(model=model(), args=args, train_dataset=data, processing_class=tokenizer(), **more)
        trainer.train()
        outcomes.append(outcome(trainer))
        if offloads:
            assert trainer.run.report().evictions > 0
    assert_same(*outcomes)
