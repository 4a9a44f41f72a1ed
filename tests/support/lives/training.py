"""Operations that train: forward, backward, step; whole steps of the run; steps that raise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext import optim
from hydra_ext.runtime.rounds.microbatch import draw_seeds
from support.lives.sides import Side
from support.lives.subjects import HOST_OPTIMIZERS, MODELS, batch, loss_of

Seen = list[Any] | None


def precision(bf16: bool, *, cached: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cached) if bf16 else nullcontext()


def backward(side: Side, data: int, divisor: int = 1, autocast: bool = False) -> Tensor | None:
    """Returns the loss of one microbatch, after adding up its gradients; None if no parameter is trained."""
    with precision(autocast):
        loss = side.loss(data)
    if not loss.requires_grad:
        return loss.detach()
    (loss / divisor).backward()
    return loss.detach()


def accumulate(side: Side, *, data: int, autocast: bool) -> Seen:
    return [backward(side, data, autocast=autocast)]


def clip(side: Side, *, norm: float) -> Seen:
    native = side.program.optimizer in HOST_OPTIMIZERS
    clipped = optim.clip_grad_norm_ if native else torch.nn.utils.clip_grad_norm_
    return [clipped(list(side.model.parameters()), norm).clone()]


def step(side: Side) -> Seen:
    side.optimizer.step()
    for schedule in side.schedules:
        schedule.step()
    return []


def zero(side: Side, *, to_none: bool) -> Seen:
    side.optimizer.zero_grad(set_to_none=to_none)
    return []


def train(side: Side, *, data: int, microbatches: int, norm: float, to_none: bool, autocast: bool) -> Seen:
    """Makes a whole step of a plain loop."""
    seen: list[Any] = [backward(side, data + index, microbatches, autocast) for index in range(microbatches)]
    if norm:
        seen += clip(side, norm=norm) or []
    step(side)
    zero(side, to_none=to_none)
    return seen


def rounds(
    side: Side,
    *,
    data: int,
    microbatches: int,
    size: int | None,
    recompute: bool | None,
    norm: float,
    seeds: int | None,
    total: bool,
    autocast: bool,
) -> Seen:
    """Calls ``run.step``, or the loop that it stands for without a run."""
    given = [batch(side.program.model, data + index) for index in range(microbatches)]
    of_each = None if seeds is None else [seeds + index for index in range(microbatches)]
    if not any(parameter.requires_grad for parameter in side.model.parameters()):
        return None

    def fn(microbatch: tuple[Tensor, Tensor]) -> Tensor:
        with precision(autocast, cached=False), side.saving():
            return loss_of(side.model, microbatch)

    if side.ours and side.run is not None:
        out = side.run.step(
            given,
            fn,
            max_norm=norm or None,
            round_size=size,
            recompute=recompute,
            reduction="sum" if total else "mean",
            seeds=of_each,
        )
        norms = [] if out.grad_norm is None else [out.grad_norm.clone()]
        seen = [*(loss.clone() for loss in out.losses), *norms]
    else:
        seen = _loop(side, given, fn, of_each or draw_seeds(microbatches), norm, 1 if total else microbatches)
    for schedule in side.schedules:
        schedule.step()
    return seen


def _loop(
    side: Side, given: list[Any], fn: Callable[[Any], Tensor], seeds: list[int], norm: float, divisor: int
) -> list[Any]:
    before = torch.get_rng_state()
    seen: list[Any] = []
    try:
        for microbatch, seed in zip(given, seeds, strict=True):
            torch.manual_seed(seed)
            loss = fn(microbatch)
            (loss / divisor).backward()
            seen.append(loss.detach())
    finally:
        torch.set_rng_state(before)  # the seeds are drawn from this state; draws of the microbatches do not change it
    if norm:
        seen += clip(side, norm=norm) or []
    side.optimizer.step()
    side.optimizer.zero_grad()
    return seen


# ---- without training -----------------------------------------------------------------------------------------------


def evaluate(side: Side, *, data: int) -> Seen:
    side.model.eval()
    try:
        with torch.no_grad():
            inputs = batch(side.program.model, data)[0]
            if inputs.is_floating_point():
                inputs = inputs.to(next(side.model.parameters()).dtype)
            return [loss_of(side.model, batch(side.program.model, data)), side.model(inputs).clone()]
    finally:
        side.model.train()


def decode(side: Side, *, data: int, words: int) -> Seen:
    """Decodes greedily: the model chooses each word from those before."""
    if MODELS[side.program.model].data != "words":
        return None
    side.model.eval()
    try:
        with torch.inference_mode():
            text = batch(side.program.model, data)[0]
            for _ in range(words):
                text = torch.cat([text, side.model(text)[:, -1].argmax(-1, keepdim=True)], 1)
        return [text]
    finally:
        side.model.train()


def gradients(side: Side, *, data: int, twice: bool) -> Seen:
    """Calls ``torch.autograd.grad``, also with a retained graph."""
    trained = [parameter for parameter in side.model.parameters() if parameter.requires_grad]
    loss = side.loss(data)
    if not loss.requires_grad:
        return None
    found = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=twice)
    if twice:
        loss.backward()
    return [loss.detach(), *(value for value in found if value is not None)]


def dropped(side: Side, *, data: int) -> Seen:
    """Makes a forward without a backward."""
    return [side.loss(data).detach()]


# ---- errors ---------------------------------------------------------------------------------------------------------


class Raised(Exception):
    """The error of a user's hook."""


ERRORS: dict[str, type[BaseException]] = {"error": Raised, "interrupt": KeyboardInterrupt}


def _raising(leaf: nn.Module, kind: str, when: str) -> Callable[[], None]:
    """Adds a hook that raises, in forward or in backward. Returns the function that removes it."""

    def raise_it(*_: Any) -> None:
        raise ERRORS[kind]()

    def in_backward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(raise_it)

    if when == "backward":
        return leaf.register_forward_hook(in_backward).remove
    return leaf.register_forward_pre_hook(raise_it).remove


def raises(side: Side, *, data: int, kind: str, where: int, when: str) -> Seen:
    """Makes a forward or backward that ends in a user's error, and then drops gradients, as any loop does."""
    remove = _raising(side.leaf(where), kind, when)
    seen: list[Any] = []
    try:
        loss = side.loss(data)
        seen.append(loss.detach())
        if loss.requires_grad:
            loss.backward()
    except (Raised, KeyboardInterrupt) as error:
        seen.append(type(error).__name__)
    finally:
        remove()
        drop_gradients(side)
    return seen


def rounds_raise(side: Side, *, data: int, microbatches: int, kind: str, last: bool, size: int | None) -> Seen:
    """Makes a ``run.step`` that ends in a user's error. Weights and optimizer state have to be as before.

    Its forwards have changed buffers and random states, which are restored here.
    """
    if side.run is not None and any(parameter.requires_grad for parameter in side.model.parameters()):
        # These are called in every forward.
        remove = _raising(side.leaves()[-1 if last else 0], kind, "forward")
        buffers = [buffer.clone() for buffer in side.model.buffers()]
        given = [batch(side.program.model, data + index) for index in range(microbatches)]
        try:
            side.run.step(given, lambda microbatch: loss_of(side.model, microbatch), round_size=size)
        except (Raised, KeyboardInterrupt):
            side.randomness.put_back()
        finally:
            remove()
        for buffer, value in zip(side.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
    drop_gradients(side)
    return []


def drop_gradients(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.grad = None
