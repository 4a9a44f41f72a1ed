"""Optimizer states whose checksums are right, and with which no step can go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hydra_ext
from hydra_ext import optim
from hydra_ext.checkpoint import optimizer_state, optimizer_values
from hydra_ext.checkpoint.format.values import BadValue

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
    "a rate beyond all numbers": options(lr=10**400),
    "a rate that is None": options(lr=None),
    "an empty state": lambda content: content["state"].update({WEIGHT: {}}),
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


@pytest.mark.every_case
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


OTHER = "1.bias"  # of the shape of the first bias


@pytest.mark.parametrize(
    ("owner", "stored"),
    [(WEIGHT, f"{WEIGHT}/exp_avg_sq"), ("0.bias", f"{OTHER}/exp_avg"), ("0.bias", f"{OTHER}/exp_avg_sq")],
)
def test_a_moment_that_is_another_is_refused(owner: str, stored: str) -> None:
    optimizer, module = stepped(optim.AdamW)
    _, content, fetch = saved(optimizer, module)
    optimizer_state.check(content, fetch)
    content["state"][owner]["exp_avg"] = {"$": "tensor", "name": stored}
    with pytest.raises(BadValue, match="belongs elsewhere"):
        optimizer_state.check(content, fetch)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "forged"),
    [
        (MAKES["centered"], lambda content: content["state"][WEIGHT].pop("momentum_buffer")),
        (MAKES["centered"], state(momentum_buffer=None)),
        (MAKES["our momentum"], lambda content: content["state"][WEIGHT].pop("momentum_buffer")),
        (MAKES["our momentum"], state(momentum_buffer=None)),
        (MAKES["momentum"], state(momentum_buffer="x")),
        (optim.SGD, lambda content: content["state"].update({WEIGHT: {"momentum_buffer": "x"}})),
        (optim.NAdamW, state(mu_product="x")),
    ],
)
def test_momenta_with_which_no_step_goes_on(
    make: Callable[[Any], torch.optim.Optimizer], forged: Callable[[Any], None]
) -> None:
    optimizer, module = stepped(make)
    names, content, fetch = saved(optimizer, module)
    forged(content)
    with pytest.raises(BadValue):
        optimizer_values.check(optimizer, names, content, fetch)


# ---- what is saved can be loaded ------------------------------------------------------------------------------------


def linear(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype))


def fit(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        inputs = torch.randn(4, 8).to(next(module.parameters()).dtype)
        module(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


Before = Callable[[nn.Module, torch.optim.Optimizer], None]


def loads(make: Callable[[Any], torch.optim.Optimizer], *, frozen: bool = False) -> Before:
    """The state of another optimizer, and perhaps two steps of the last layer after it."""

    def before(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        theirs = make(module.parameters())
        fit(module, theirs)
        optimizer.load_state_dict(theirs.state_dict())
        if frozen:
            module[0].requires_grad_(False)
            fit(module, optimizer)

    return before


def sets(**options: Any) -> Before:
    """As a schedule does."""

    def before(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        fit(module, optimizer)
        optimizer.param_groups[0].update(options)

    return before


def looks(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torch makes a state where there is none."""
    assert not optimizer.state[module[0].weight]


TORCHS_MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TORCHS_NADAM = partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True)
CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Before]] = {
    "ours has loaded torch's momentum": (MAKES["our momentum"], loads(TORCHS_MOMENTUM)),
    "ours has loaded torch's momentum, frozen": (MAKES["our momentum"], loads(TORCHS_MOMENTUM, frozen=True)),
    "ours has loaded torch's AdamW": (optim.AdamW, loads(torch.optim.AdamW)),
    "ours has loaded torch's AdamW, frozen": (optim.AdamW, loads(torch.optim.AdamW, frozen=True)),
    "our momentum sinks to 0": (MAKES["our momentum"], sets(momentum=0.0)),
    "our momentum rises from 0": (optim.SGD, sets(momentum=0.9)),
    "torch's momentum sinks to 0": (TORCHS_MOMENTUM, sets(momentum=0.0)),
    "torch's momentum rises from 0": (torch.optim.SGD, sets(momentum=0.9)),
    "torch's other momentum sinks to 0": (MAKES["centered"], sets(momentum=0.0)),
    "a rate below zero": (optim.AdamW, sets(lr=-1e-3)),
    "a rate of torch's below zero": (torch.optim.SGD, sets(lr=-1e-3)),
    "what was looked for": (optim.AdamW, looks),
}
DELAYED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Before]] = {
    "the delayed one has loaded torch's": (optim.DelayCorrectedAdamW, loads(torch.optim.AdamW)),
    "the delayed one has loaded torch's, frozen": (optim.DelayCorrectedAdamW, loads(torch.optim.AdamW, frozen=True)),
    "the correction rises": (partial(optim.DelayCorrectedAdamW, correction=0.0), sets(correction=1.0)),
    "the correction sinks": (optim.DelayCorrectedAdamW, sets(correction=0.0)),
    "a product of momenta that was torch's": (optim.NAdamW, loads(TORCHS_NADAM)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(CASES, [torch.float32, torch.bfloat16]), *product(DELAYED, [torch.float32])],
)
def test_what_was_saved_is_loaded_and_gone_on_from(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, before = (CASES | DELAYED)[name]
    module, again = linear(dtype), linear(dtype)
    optimizer, theirs = make(module.parameters()), make(again.parameters())
    before(module, optimizer)
    with hydra_ext.offload(module, optimizer, budget="1MiB") as run:
        run.save(tmp_path)
    for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
        other.requires_grad_(parameter.requires_grad)
    with hydra_ext.offload(again, theirs, budget="1MiB") as run:
        assert run.load(tmp_path) is not None
        fit(again, theirs, 1)
    fit(module, optimizer, 1)
    assert all(map(torch.equal, module.parameters(), again.parameters()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.optim.Adafactor, partial(torch.optim.Adafactor, eps=(1e-30, 1e-3))),
        (torch.optim.LBFGS, partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")),
    ],
)
def test_none_may_stand_where_a_class_has_none(
    one: Callable[[Any], torch.optim.Optimizer], other: Callable[[Any], torch.optim.Optimizer]
) -> None:
    module = model()
    makes = [one(module.parameters()), other(module.parameters())]
    for saver, loader in (makes, reversed(makes)):
        optimizer_values.check(loader, *saved(saver, module))


def test_no_hook_of_all_optimizers_is_called() -> None:
    optimizer, module = stepped(optim.AdamW)
    called: list[object] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        optimizer_values.check(optimizer, *saved(optimizer, module))
    finally:
        for hook in hooks:
            hook.remove()
    assert not called


@pytest.mark.parametrize("sizes", [(2,) * 13, (1,) * 40])
def test_many_dimensions_take_few_numbers(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(sizes))
    optimizer = torch.optim.AdamW(module.parameters())
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    made: list[int] = []
    ones = torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda shape, **options: (made.append(math.prod(shape)), ones(shape, **options))[1]
    )
    optimizer_values.check(optimizer, *saved(optimizer, module))
    assert made
    assert max(made) <= 4


def test_groups_of_other_rates_are_tried_once() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(20)))
    groups = [{"params": [parameter], "lr": 0.1 * number} for number, parameter in enumerate(module.parameters())]
    optimizer = torch.optim.AdamW(groups)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stored = saved(optimizer, module)
    with mock.patch.object(
        torch.optim.AdamW, "__init__", autospec=True, side_effect=torch.optim.AdamW.__init__
    ) as made:
        optimizer_values.check(optimizer, *stored)
    assert made.call_count == 2  # whether it takes the options, and a step with them
