"""One training loop for plain and offloaded models, with the options that the parity matrix combines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hydra_ext import _C
from support.models.zoo import Batch, Family

STEPS = 20

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        accumulate: Batches per step.
        clip: Whether the norm of the gradients is clipped.
        checkpointing: "no", "plain" or "reentrant".
        autocast: Whether the forward runs in bfloat16.
        between: The work between steps, without gradients: "nothing", "evaluation" or "generation".
        tuning: The trained parameters: "all", "half" (the first half is frozen) or "adapters".
    """

    optimizer: str = "adamw"
    accumulate: int = 1
    clip: bool = False
    checkpointing: str = "no"
    autocast: bool = False
    between: str = "nothing"
    tuning: str = "all"

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def build(family: Family, recipe: Recipe, seed: int = 0) -> nn.Module:
    """Builds the user's model: frozen, adapted and checkpointed as the recipe says."""
    model = family.make(seed)
    if recipe.checkpointing != "no":
        family.set_checkpointing(model, reentrant=recipe.checkpointing == "reentrant")
    if recipe.tuning == "half":
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)
    elif recipe.tuning == "adapters":
        model = peft.get_peft_model(
            model,
            # With the library's zeros, half of the adapters would have no gradient in the first step.
            peft.LoraConfig(
                r=4,
                target_modules=list(family.adapters),
                init_lora_weights="gaussian",
                lora_dropout=0.1,
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            ),
        )
    return model.train()


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    return OPTIMIZERS[recipe.optimizer]([p for p in model.parameters() if p.requires_grad])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    family: Family,
    recipe: Recipe,
    *,
    steps: int = STEPS,
    first: int = 0,
    after_step: Callable[[int], object] = lambda step: None,
) -> list[Tensor]:
    """Trains, and returns everything visible: losses, norms, and outputs of the work between steps."""
    seen: list[Tensor] = []
    batches = family.batches(1, 2 * STEPS)
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for batch in islice(cycle(batches), step * recipe.accumulate, (step + 1) * recipe.accumulate):
            with recipe.precision():
                loss = family.loss(model, batch) / recipe.accumulate
            loss.backward()
            seen.append(loss.detach().clone())
        if recipe.clip:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).clone())
        optimizer.step()
        optimizer.zero_grad()
        if something_follows(recipe, step):
            seen += _between_steps(model, family, recipe, batches[step])
        after_step(step)
    return seen


def something_follows(recipe: Recipe, step: int) -> bool:
    """Whether the model is evaluated, or generates, between this step and the next."""
    return recipe.between != "nothing" and step % 5 == 1


@torch.no_grad()
def _between_steps(model: nn.Module, family: Family, recipe: Recipe, batch: Batch) -> list[Tensor]:
    model.eval()
    with recipe.precision():
        seen = family.loss(model, batch) if recipe.between == "evaluation" else family.generate(model, batch)
    model.train()
    return [seen.clone()]


def differences(
    ours: tuple[list[Tensor], nn.Module, torch.optim.Optimizer],
    plain: tuple[list[Tensor], nn.Module, torch.optim.Optimizer],
) -> list[str]:
    """Names results, parameters, buffers and optimizer state that are not equal to the last bit."""
    found = [
        f"value {index} seen"
        for index, (a, b) in enumerate(zip(ours[0], plain[0], strict=True))
        if not torch.equal(a, b)
    ]
    reference = plain[1].state_dict()
    state = ours[1].state_dict()
    assert list(state) == list(reference)
    found += [name for name in reference if not torch.equal(state[name], reference[name])]
    slots, slots_reference = ours[2].state_dict()["state"], plain[2].state_dict()["state"]
    assert slots.keys() == slots_reference.keys()  # in the order of their first step
    for index, entries in slots_reference.items():
        assert list(slots[index]) == list(entries)
        for key, value in entries.items():
            same = torch.equal(slots[index][key], value) if isinstance(value, Tensor) else slots[index][key] == value
            if not same:
                found.append(f"optimizer state {index}.{key}")
    return found


def plain_peak(family: Family, recipe: Recipe, *, steps: int = 2) -> int:
    """Returns the peak of device bytes of plain steps, without parameters and summed gradients."""
    model = build(family, recipe)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    meter = _C.testing.Meter()
    for step, batch in enumerate(family.batches(1, steps)):
        torch.manual_seed(step)
        meter.begin()
        try:
            with recipe.precision():
                inputs = {name: value.clone() for name, value in batch.items()}
                loss = family.loss(model, inputs) / recipe.accumulate
            del inputs
            loss.backward()
        finally:
            meter.end()
        del loss
    return meter.ledger.peak + sum(buffer.nbytes for buffer in model.buffers())


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
