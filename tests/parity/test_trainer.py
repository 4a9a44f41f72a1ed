"""The Trainer of transformers, whose words for "the parameters are on the host" are ``use_cpu=True``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hydra_ext
from support.benches import assert_same, tight_budget
from support.runtime.outcomes import POISONED
from support.windows.window_subjects import batch, language_loss, tiny_gpt2

STEPS = 3


def trained(folder: Path, *, budget: int | None, bf16: bool) -> list[torch.Tensor]:
    """Losses and weights."""
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = [{"input_ids": row, "labels": row} for index in range(STEPS) for row in batch(index)]
    options = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        max_steps=STEPS,
        per_device_train_batch_size=len(batch(0)),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    offloaded = nullcontext() if budget is None else hydra_ext.offload(model, optimizer, budget=budget, checks=POISONED)
    with offloaded as run:
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = Trainer(model, options, train_dataset=samples, optimizers=(optimizer, constant))  # type: ignore[arg-type]
        trainer.train()
        if run is not None:
            report = run.report()
            assert report.windows == 2 * STEPS
            assert report.evictions > 0
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return [torch.tensor(losses, dtype=torch.float64), *model.state_dict().values()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_trains_as_it_does_without_offload(bf16: bool, tmp_path: Path) -> None:
    expected = trained(tmp_path, budget=None, bf16=bf16)
    assert_same(expected, trained(tmp_path, budget=tight_budget(tiny_gpt2(), language_loss), bf16=bf16))
