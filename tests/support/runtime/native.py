"""A model, its training and its optimizer's state, for tests of the native optimizers inside a context."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hydra_ext import optim
from support.benches import Outcome

WIDTH = 64
LAYERS = 6
STEPS = 5
BATCHES = torch.randn(STEPS, 8, WIDTH, generator=torch.Generator().manual_seed(1))

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2),
    "adam": lambda parameters: optim.Adam(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)])


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    entries = [
        value.clone()
        for parameter in model.parameters()
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor)
    ]
    return [*(parameter.detach().clone() for parameter in model.parameters()), *entries]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, between: Callable[[], Any] = lambda: None) -> Outcome:
    seen: Outcome = []
    dtype = next(model.parameters()).dtype
    for batch in BATCHES:
        loss = model(batch.to(dtype)).pow(2).mean()
        loss.backward()
        seen.append(optim.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
        found = between()
        if isinstance(found, torch.Tensor):
            seen.append(found.detach().clone())
    return seen


# Actions of user code after a step. Each must give the same result as on a plain model.
BETWEEN: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "reads a parameter": lambda model, _: model[3].weight.sum(),
    "reads the last": lambda model, _: model[LAYERS - 1].bias * 2,
    "reads them together": lambda model, _: torch.stack(torch._foreach_norm([*model.parameters()])),
    "writes a parameter": lambda model, _: model[2].weight.data.mul_(0.5),
    "replaces a parameter's data": lambda model, _: setattr(model[2].weight, "data", torch.ones(WIDTH, WIDTH)),
    "replaces state": lambda model, optimizer: setattr(
        optimizer.state[model[3].weight]["exp_avg"], "data", torch.zeros(WIDTH, WIDTH)
    ),
    "reads state": lambda model, optimizer: optimizer.state[model[1].weight]["exp_avg"].sum(),
    "state_dict": lambda model, _: model.state_dict()["4.weight"],
    "state_dict of a part": lambda model, _: model[4].state_dict()["weight"],
    "optimizer's state_dict": lambda _, optimizer: optimizer.state_dict()["state"][2]["exp_avg_sq"],
    "saves the model": lambda model, _: torch.save(model.state_dict(), io.BytesIO()),
    "pickles the model": lambda model, _: pickle.loads(pickle.dumps(model))[0].weight,  # noqa: S301 - its own
    "copies the model": lambda model, _: copy.deepcopy(model)[0].weight,
    "copies the optimizer": lambda model, optimizer: copy.deepcopy(optimizer).param_groups[0]["params"][0],
    "evaluates": lambda model, _: torch.no_grad()(model)(BATCHES[0]),
    "evaluates a part": lambda model, _: torch.no_grad()(model[4])(BATCHES[0]),
    "computes with the parameters": lambda model, _: torch.cat([p.flatten() for p in model.parameters()]),
}
