"""Optimizer states whose checksums are right, and with which no step can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext import optim
from hydra_ext.checkpoint import optimizer_state, optimizer_values
from hydra_ext.checkpoint.values import BadValue

WEIGHT = "0.weight"


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Conv1d(8, 8, 3, dtype=dtype))


def saved(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[dict[int, str], Any, Callable[[str], Any]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state = optimizer_state.capture(optimizer, names)
    tensors = {entry.name: entry.fetch() for group in state.groups for entry in group}
    return names, state.content, lambda name: tensors[name].to("meta")


def stepped(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> Any:
    module = model(dtype)
    optimizer = make(
        [parameter for parameter in module.parameters() if parameter.dim() == 2]
        if make is MUON
        else module.parameters()
    )
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: torch.zeros(()))
    return optimizer, module


MUON = getattr(torch.optim, "Muon", None)
MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        name: getattr(torch.optim, name)
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
        and name not in ("Optimizer", "SparseAdam")
    },
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, maximize=True, foreach=True),
    "tensor rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False),
    "tensor betas": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "centered": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "ours": optim.AdamW,
    "ours, halved": lambda parameters: optim.Adam(parameters, moments=torch.bfloat16),
    "our momentum": lambda parameters: optim.SGD(parameters, momentum=0.9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKES)
def test_what_an_optimizer_has_is_fine(name: str, dtype: torch.dtype) -> None:
    optimizer, module = stepped(MAKES[name], dtype)
    optimizer_values.check(optimizer, *saved(optimizer, module))


@pytest.mark.parametrize("make", [torch.optim.SGD, optim.SGD], ids=["torch", "ours"])
def test_so_is_what_a_schedule_has_set(make: Callable[..., torch.optim.Optimizer]) -> None:
    """No constructor takes Nesterov's rule without a momentum."""
    optimizer, module = stepped(lambda parameters: make(parameters, lr=0.1, momentum=0.9, nesterov=True))
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer_values.check(optimizer, *saved(optimizer, module))


@pytest.mark.parametrize("make", [torch.optim.AdamW, optim.AdamW], ids=["torch", "ours"])
def test_so_is_what_it_has_loaded(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Some rules of torch's are in no group of ours then."""
    optimizer, module = stepped(optim.AdamW)
    theirs, _ = stepped(make)
    optimizer.load_state_dict(theirs.state_dict())
    optimizer_values.check(optimizer, *saved(optimizer, module))


def options(**changes: Any) -> Callable[[Any], None]:
    return lambda content: content["groups"][0]["options"].update(changes)


def state(**changes: Any) -> Callable[[Any], None]:
    return lambda content: content["state"][WEIGHT].update(changes)


BIAS = {"$": "tensor", "name": "0.bias/exp_avg"}
FORGED: dict[str, Callable[[Any], Any]] = {
    "a moment of another shape": state(exp_avg=BIAS),
    "a moment that is a number": state(exp_avg=1.0),
    "no moment": lambda content: content["state"][WEIGHT].pop("exp_avg"),
    "a moment that is None": state(exp_avg_sq=None),
    "no count": lambda content: content["state"][WEIGHT].pop("step"),
    "a count that is text": state(step="x"),
    "a count beyond all numbers": state(step=10**400),
    "a count that is a matrix": state(step={"$": "tensor", "name": f"{WEIGHT}/exp_avg"}),
    "a rate that is text": options(lr="x"),
    "a rate that is a matrix": options(lr={"$": "tensor", "name": f"{WEIGHT}/exp_avg"}),
    "a rate that is no number": options(lr={"$": "float", "name": "nan"}),
    "no rate": lambda content: content["groups"][0]["options"].pop("lr"),
    "three betas": options(betas=[0.9, 0.9, 0.9]),
    "betas of 2": options(betas=[2.0, 2.0]),
    "a negative epsilon": options(eps=-1.0),
    "a decay that is text": options(weight_decay="x"),
}


@pytest.mark.parametrize("make", [optim.AdamW, torch.optim.AdamW], ids=["ours", "torch"])
@pytest.mark.parametrize("forged", FORGED)
def test_what_no_step_can_go_on_from_is_refused(forged: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    optimizer, module = stepped(make)
    names, content, fetch = saved(optimizer, module)
    FORGED[forged](content)
    with pytest.raises(BadValue):
        optimizer_values.check(optimizer, names, content, fetch)


@pytest.mark.parametrize(
    "forged",
    [
        options(moments={"$": "dtype", "name": "bfloat16"}),
        options(moments={"$": "dtype", "name": "int8"}),
        options(master="nonsense"),
        state(master_lower=BIAS),
        state(master=BIAS),
    ],
)
def test_what_only_native_optimizers_have(forged: Callable[[Any], None]) -> None:
    optimizer, module = stepped(optim.AdamW)
    names, content, fetch = saved(optimizer, module)
    forged(content)
    with pytest.raises(BadValue):
        optimizer_values.check(optimizer, names, content, fetch)
