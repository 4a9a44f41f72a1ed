"""Trainers of a tiny model, and what comes of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from hydra_ext.integrations.transformers import HydraArguments, HydraTrainer
from support.benches import tight_budget
from support.runtime.outcomes import POISONED
from support.windows.window_subjects import batch, language_loss, tiny_gpt2

STEPS = 4


def samples(first: int, count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for index in range(count) for row in batch(first + index)]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "learning_rate": 1e-3,
            **options,
        }
    )


def hydra(**options: Any) -> HydraArguments:
    budget = options.pop("budget", None) or tight_budget(tiny_gpt2(), language_loss)
    return HydraArguments(budget=budget, others={"checks": POISONED}, **options)


def outcome(trainer: Trainer) -> list[Any]:
    """What was logged, without times; weights; and states of the optimizer."""
    times = ("runtime", "per_second", "preparation_time", "hydra/")
    history = [
        torch.tensor(value, dtype=torch.float64)
        for entry in trainer.state.log_history
        for key, value in sorted(entry.items())
        if not any(part in key for part in times)
    ]
    return [*history, *trainer.model.state_dict().values(), *states_of(trainer.model, trainer.optimizer)]


def states_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Tensors of the optimizer, in the order of the model's parameters."""
    states = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def without_dropout() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = tiny_gpt2().config
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).train()


def forget_accelerate() -> None:
    """Its configuration belongs to the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train_on_ranks(rank: int, folder: str, options: dict[str, Any], draws: bool) -> list[Any]:
    """A rank's outcomes of a plain Trainer, and of a HydraTrainer with its counts of rounds and of averaged bytes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # the group is there already
    found: list[Any] = []
    make: Callable[[], Any] = tiny_gpt2 if draws else without_dropout
    for kind, more in ((Trainer, {}), (HydraTrainer, {"hydra": hydra()})):
        forget_accelerate()
        args = arguments(Path(folder) / f"{kind.__name__}-{rank}", **options)
        trainer: Any = kind(make(), args, train_dataset=samples(0, 2 * STEPS), **more)
        trainer.train()
        found.append(outcome(trainer))
    assert trainer.model_wrapped is trainer.model  # nothing is around it
    report = trainer.run.report()
    return [*found, report.rounds, report.reduced_bytes, report.ranks]
