"""Operations that train in less usual ways: parts, hooks, scalers, closures, several graphs, checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext import optim
from support.lives.sides import Side
from support.lives.subjects import HOST_OPTIMIZERS, batch, loss_of
from support.lives.training import backward, step

Seen = list[Any] | None


def part(side: Side, *, which: int, data: int, trains: bool) -> Seen:
    """Calls a single layer."""
    linears = [module for module in side.model.modules() if isinstance(module, nn.Linear)]
    linear = linears[which % len(linears)]
    inputs = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(data))
    inputs = inputs.to(next(side.model.parameters()).dtype)
    with nullcontext() if trains else torch.no_grad():
        output = linear(inputs)
    if output.requires_grad:
        output.float().square().mean().backward()
    return [output.detach().clone()]


def hooked(side: Side, *, which: int, factor: float) -> Seen:
    """Adds a hook on a parameter that changes its gradients from now on."""
    parameter = side.parameter(which)
    if not parameter.requires_grad:
        return None
    parameter.register_hook(lambda gradient: gradient * factor)
    return []


def scale_gradients(side: Side, *, which: int, how: str) -> Seen:
    """Changes a gradient between backward and step, as users do."""
    parameter = side.parameter(which)
    if parameter.grad is None:
        return None
    if how == "in place":
        parameter.grad.mul_(2)
    elif how == "new":
        parameter.grad = parameter.grad * 2
    elif how == "data":
        parameter.grad.data.mul_(2)
    else:
        parameter.grad = None
    return []


def scaled(side: Side, *, data: int, microbatches: int, whole: bool, norm: float) -> Seen:
    """Makes a step with a ``GradScaler``, in a plain loop or as ``run.step(scaler=)``."""
    scaler = side.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    if not any(parameter.requires_grad for parameter in side.model.parameters()):
        return None
    given = [batch(side.program.model, data + index) for index in range(microbatches)]
    if whole and side.inside and side.run is not None:
        fn = lambda microbatch: loss_of(side.model, microbatch)  # noqa: E731 - short
        out = side.run.step(given, fn, scaler=scaler, max_norm=norm or None, seeds=[*range(microbatches)])
        return [*(loss.clone() for loss in out.losses), torch.tensor(scaler.get_scale())]
    before = torch.get_rng_state()
    seen: list[Any] = []
    for index, microbatch in enumerate(given):
        if whole and side.inside:
            torch.manual_seed(index)
        with side.saving():
            loss = loss_of(side.model, microbatch)
        scaler.scale(loss / microbatches).backward()
        seen.append(loss.detach())
    if whole and side.inside:
        torch.set_rng_state(before)
    scaler.unscale_(side.optimizer)
    if norm:
        native = side.program.optimizer in HOST_OPTIMIZERS
        (optim.clip_grad_norm_ if native else torch.nn.utils.clip_grad_norm_)(list(side.model.parameters()), norm)
    scaler.step(side.optimizer)
    scaler.update()
    side.optimizer.zero_grad()
    return [*seen, torch.tensor(scaler.get_scale())]


def closed(side: Side, *, data: int) -> Seen:
    """Calls ``optimizer.step(closure)``."""

    def closure() -> float:
        side.optimizer.zero_grad()
        loss = backward(side, data)
        return 0.0 if loss is None else loss.item()

    return [side.optimizer.step(closure)]


def observed(side: Side, *, data: int, how: str) -> Seen:
    """Makes a step that is traced, or whose figures are reported."""
    if side.run is None:
        context: Any = nullcontext()
    elif how == "trace":
        context = side.run.trace(side.folder() / "trace.json")
    else:
        side.removals.callback(side.run.on_step(lambda figures: figures.as_dict()).remove)
        context = nullcontext()
    with context:
        loss = backward(side, data)
        step(side)
    return [loss]


def checkpointed(side: Side, *, how: str) -> Seen:
    """Switches calls of blocks through torch's checkpoints on or off."""
    for module in side.model.modules():
        if hasattr(module, "again"):
            module.again = how
    return []


def two_graphs(side: Side, *, data: int, how: str) -> Seen:
    """Makes two forwards before their backwards, or two backwards through one graph."""
    first = side.loss(data)
    if not first.requires_grad:
        return None
    if how == "retained":
        first.backward(retain_graph=True)
        first.backward()
        return [first.detach()]
    second = side.loss(data + 1)
    losses: list[Tensor] = [first, second] if how == "in order" else [second, first]
    for loss in losses:
        loss.backward()
    return [first.detach(), second.detach()]


def twice_differentiated(side: Side, *, data: int) -> Seen:
    """Trains with a loss that includes the gradient's size."""
    if side.program.model not in ("layered", "experts", "pictures"):
        return None
    inputs, wanted = batch(side.program.model, data)
    inputs = inputs.to(next(side.model.parameters()).dtype).requires_grad_()
    with side.saving():
        loss = torch.nn.functional.cross_entropy(side.model(inputs).float(), wanted)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    if not slope.requires_grad:
        return None
    (loss + slope.square().sum()).backward()
    return [loss.detach(), slope.detach()]
