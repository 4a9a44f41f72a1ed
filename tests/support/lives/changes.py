"""Operations between steps: trained parameters, rates, states, averages, memory, forms of parameters, checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from support.lives import contexts
from support.lives.sides import Side
from support.lives.subjects import batch, loss_of
from support.lives.training import drop_gradients

Seen = list[Any] | None


def bytes_known(side: Side) -> None:
    """Around raw access inside a context: waits for updates first, and reports the write afterwards."""
    if side.run is not None:
        side.run.sync()


def written(side: Side) -> None:
    if side.run is not None:
        side.run.refresh()


# ---- trained parameters and rates -----------------------------------------------------------------------------------


def freeze(side: Side, *, which: int, trained: bool) -> Seen:
    side.leaf(which).requires_grad_(trained)
    return []


def thaw(side: Side) -> Seen:
    side.model.requires_grad_(True)
    return []


def add_group(side: Side) -> Seen:
    """Adds a group of the parameters that the optimizer does not have."""
    if not side.rest:
        return None
    rest, side.rest = side.rest, []
    if side.program.optimizer == "Muon":
        side.optimizer.add_param_group({"params": rest, "orthogonalize": False})
    else:
        side.optimizer.add_param_group({"params": rest, "lr": 1e-3})
    side.structure += 1
    return []


def rate(side: Side, *, factor: float) -> Seen:
    for group in side.optimizer.param_groups:
        group["lr"] *= factor
    return []


def schedule(side: Side, *, kind: str) -> Seen:
    if side.schedules or (side.rest and kind == "lambda"):
        return None
    schedulers = torch.optim.lr_scheduler
    made = {
        "exponential": lambda: schedulers.ExponentialLR(side.optimizer, 0.9),
        "cosine": lambda: schedulers.CosineAnnealingLR(side.optimizer, 7),
        "steps": lambda: schedulers.StepLR(side.optimizer, 2, 0.5),
    }[kind]
    side.schedules.append(made())
    side.structure += 1
    return []


# ---- states ---------------------------------------------------------------------------------------------------------


def reload(side: Side, *, what: str, through: str) -> Seen:
    """``load_state_dict(state_dict())``, of the model or the optimizer, directly, by a copy or through a file."""
    owner: Any = side.model if what == "model" else side.optimizer
    state = owner.state_dict()
    if through == "copy":
        state = copy.deepcopy(state)
    elif through == "file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file)
    owner.load_state_dict(state)
    return []


def keep_state(side: Side) -> Seen:
    model, optimizer = copy.deepcopy(side.model.state_dict()), copy.deepcopy(side.optimizer.state_dict())
    side.kept["state"] = (side.structure, model, optimizer)
    return []


def take_state(side: Side) -> Seen:
    """Restores the states kept before, if names and groups are still the same."""
    if "state" not in side.kept or side.kept["state"][0] != side.structure:
        return None
    _, model, optimizer = side.kept["state"]
    side.model.load_state_dict(model)
    side.optimizer.load_state_dict(optimizer)
    return []


def save(side: Side) -> Seen:
    """Calls ``run.save``, or copies the state without a run."""
    if not side.inside:
        return None
    drop_gradients(side)
    if side.run is not None:
        side.run.save(side.folder(), schedule=side.schedules[0] if side.schedules else None, keep=1)
    side.kept["saved"] = (side.structure, side.snapshot() if side.run is None else None)
    return []


def load(side: Side) -> Seen:
    if not side.inside or "saved" not in side.kept or side.kept["saved"][0] != side.structure:
        return None
    if side.run is not None:
        side.run.load(side.folder(), schedule=side.schedules[0] if side.schedules else None)
    else:
        side.go_back(side.kept["saved"][1])
    return []


# ---- averages and copies --------------------------------------------------------------------------------------------


def average(side: Side, *, decay: float) -> Seen:
    """Keeps an average of the weights by hand: creates it first, then updates it."""
    if side.kept.get("average", {}).keys() != dict(side.model.named_parameters()).keys():
        side.kept["average"] = {name: value.detach().clone() for name, value in side.model.named_parameters()}
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            side.kept["average"][name].lerp_(parameter, 1 - decay)
    return []


def averaged(side: Side, *, data: int) -> Seen:
    """Keeps an ``swa_utils.AveragedModel``: creates it first, then updates and calls it."""
    if "averaged" not in side.kept or side.kept["averaged names"] != side.structure:
        side.kept["averaged"] = AveragedModel(side.model)
        side.kept["averaged names"] = side.structure
    side.kept["averaged"].update_parameters(side.model)
    return copied_says(side.kept["averaged"].module, side, data)


def copied_says(model: nn.Module, side: Side, data: int) -> list[Any]:
    model.eval()
    with torch.no_grad():
        return [loss_of(model, batch(side.program.model, data))]


def copied(side: Side, *, data: int) -> Seen:
    return copied_says(copy.deepcopy(side.model), side, data)


# ---- memory ---------------------------------------------------------------------------------------------------------


def write(side: Side, *, which: int, how: str) -> Seen:
    """Writes to a parameter as users do. After a write without a version bump, ``refresh()`` follows."""
    parameter = side.parameter(which)
    with torch.no_grad():
        if how == "in place":
            parameter.mul_(0.9)
            return []
        if how == "data":
            parameter.data.mul_(0.9)
        elif how == "new data":
            parameter.data = parameter.data * 0.9
            side.structure += 1
        elif how == "element":
            parameter.data.view(-1)[0] = 0.25
        elif parameter.dtype == torch.float32:
            bytes_known(side)
            parameter.detach().numpy()[..., 0] = 0.125
    written(side)
    return []


def share(side: Side, *, how: str, which: int) -> Seen:
    """Gives several tensors one memory, or each its own memory again."""
    with torch.no_grad():
        parameters = list(side.model.parameters())
        if how == "vector":
            vector_to_parameters(parameters_to_vector(parameters), parameters)
        elif how == "gradients":
            flat_gradients(parameters)
        elif how == "pair":
            first = side.parameter(which)
            others = [
                p for p in parameters if p is not first and p.shape == first.shape and p.stride() == first.stride()
            ]
            if not others:
                return None
            first.data = others[which % len(others)].data
        else:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
    side.structure += 1
    written(side)
    return []


def flat_gradients(parameters: list[nn.Parameter]) -> None:
    """Makes every gradient a view of one buffer."""
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype)
    at = 0
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()


def sync(side: Side) -> Seen:
    bytes_known(side)
    return []


# ---- forms of parameters, which must not change during a run ---------------------------------------------------------


def reform(side: Side, *, which: int, how: str) -> Seen:
    """Parametrizes or prunes a linear layer, and makes a new optimizer. Works outside of the context only."""
    linears = [module for module in side.model.modules() if isinstance(module, nn.Linear)]
    linear = linears[which % len(linears)]
    tied = sum(module._parameters.get("weight") is linear._parameters.get("weight") for module in side.model.modules())
    plain = "weight" in linear._parameters
    if side.inside or side.schedules or side.rest or (plain and tied > 1):
        return None
    if not plain:
        if parametrize.is_parametrized(linear):
            parametrize.remove_parametrizations(linear, "weight")
        else:
            prune.remove(linear, "weight")
    elif how == "pruned":
        prune.l1_unstructured(linear, "weight", amount=0.3)
    elif how == "weight norm":
        parametrizations.weight_norm(linear)
    else:
        parametrize.register_parametrization(linear, "weight", Doubled())
    side.structure += 1
    side.make_optimizer()
    return []


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def enter(side: Side, **how: Any) -> Seen:
    if side.inside:
        return None
    contexts.enter(side, **how)
    side.inside = True
    return []


def stash(side: Side, *, policy: str, budget: int | None, device: str, seed: int) -> Seen:
    """Switches to a new stash for tensors saved for backward, or ends it."""
    if side.ours:
        contexts.stash(side, policy=policy, budget=budget, device=device, seed=seed)
    return []


def leave(side: Side) -> Seen:
    if not side.inside:
        return None
    side.inside = False
    contexts.leave(side)
    return []
