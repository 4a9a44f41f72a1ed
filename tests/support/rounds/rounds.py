"""``run.step``, the loop that it stands for, and the comparison to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C
from hydra_ext.runtime.rounds import isolation
from support.models.zoo import Family
from support.training import OPTIMIZERS

STEPS = 5
Loss = Callable[[nn.Module, Any], Any]
# Families whose microbatches take different paths.
DIVERGENT = ("bart", "dynamic", "experts")


@dataclass(frozen=True)
class Plan:
    """A training and its options."""

    m: int = 3
    clip: bool = False
    autocast: bool = False
    reduction: str = "mean"
    optimizer: str = "adamw"

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if self.autocast else nullcontext()

    @property
    def max_norm(self) -> float | None:
        return 0.5 if self.clip else None

    def seeds(self, step: int) -> list[int]:
        return [1000 * step + index for index in range(self.m)]


@dataclass
class Seen:
    """The visible results of a training: losses, norms, the gradients before each update, the buffers after it."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    buffers: list[list[Tensor]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def note(*_: Any) -> None:
            self.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

        optimizer.register_step_pre_hook(note)

    def step_ended(self, model: nn.Module) -> None:
        self.buffers.append([buffer.detach().clone() for buffer in model.buffers()])
        self.parameters = [parameter.detach().clone() for parameter in model.parameters()]

    def gradient_bytes(self, step: int) -> int:
        return sum(gradient.nbytes for gradient in self.gradients[step] if gradient is not None)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def differences(ours: Seen, plain: Seen) -> list[str]:
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(ours.losses, plain.losses, strict=True)) if not same(a, b)]
    found += [f"norm {i}" for i, (a, b) in enumerate(zip(ours.norms, plain.norms, strict=True)) if not same(a, b)]
    for name in ("gradients", "buffers"):
        for step, (a, b) in enumerate(zip(getattr(ours, name), getattr(plain, name), strict=True)):
            pairs = zip(a, b, strict=True)
            found += [f"{name} {step}.{index}" for index, (x, y) in enumerate(pairs) if not same(x, y)]
    pairs = zip(ours.parameters, plain.parameters, strict=True)
    return found + [f"parameter {index}" for index, (x, y) in enumerate(pairs) if not same(x, y)]


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    return OPTIMIZERS[plan.optimizer]([p for p in model.parameters() if p.requires_grad])


def train_loop(model: nn.Module, loss: Loss, batches: Sequence[Any], plan: Plan, *, steps: int = STEPS) -> Seen:
    """The loop that ``run.step`` stands for."""
    seen, optimizer = Seen(), build_optimizer(model, plan)
    seen.watch(model, optimizer)
    for step in range(steps):
        for index, seed in enumerate(plan.seeds(step)):
            torch.manual_seed(seed)
            with plan.precision():
                value = loss(model, batches[step * plan.m + index])
            (value / plan.m if plan.reduction == "mean" else value).backward()
            seen.losses.append(value.detach())
        if plan.max_norm is not None:
            seen.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        seen.step_ended(model)
    return seen


def train_rounds(
    run: hydra_ext.Run,
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    plan: Plan,
    *,
    steps: int = STEPS,
    after_step: Callable[[int], object] = lambda step: None,
    **choices: Any,
) -> Seen:
    seen = Seen()
    assert run.optimizer is not None
    seen.watch(model, run.optimizer)

    def forward(batch: Any) -> Any:
        with plan.precision():
            return loss(model, batch)

    for step in range(steps):
        mine = batches[step * plan.m : (step + 1) * plan.m]
        out = run.step(
            mine, forward, seeds=plan.seeds(step), max_norm=plan.max_norm, reduction=plan.reduction, **choices
        )
        seen.losses += [value.clone() for value in out.losses]
        seen.norms += [] if out.grad_norm is None else [out.grad_norm.clone()]
        assert_nothing_left(run)
        seen.step_ended(model)
        after_step(step)
    return seen


def assert_nothing_left(run: hydra_ext.Run) -> None:
    """Asserts that between steps there is no fiber, no replaced function, no window and no pin."""
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("microbatch")]
    assert nn.Module.__setattr__ is not isolation._setattr
    assert torch.set_autocast_cache_enabled is not isolation._set_cache
    assert not run.core.gate.open
    assert run.core.pager.pins == 0
    assert torch.is_autocast_cache_enabled()


def activations_of_rounds(family: Family, plan: Plan, batches: Sequence[Any], **choices: Any) -> int:
    """Returns the peak of device bytes of the steps' activations, with room for everything."""
    model = family.make(0)
    checks = hydra_ext.Checks(poison_hosts=True)
    with hydra_ext.offload(model, build_optimizer(model, plan), budget=2**30, checks=checks) as run:
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD, _C.PassKind.INFERENCE)
        sizes: list[int] = []

        def note(_step: int) -> None:
            sizes.extend(size for kind in kinds for _, size in run.core.pager.recorded(kind))

        # All steps count: microbatches of some families take different paths.
        steps = len(batches) // plan.m
        train_rounds(run, model, family.loss, batches, plan, steps=steps, after_step=note, **choices)
        return max(sizes)


def peak_of_loop(family: Family, plan: Plan) -> int:
    """Returns the peak of device bytes of one microbatch's activations."""
    model = family.make(0)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    meter = _C.testing.Meter()
    peak = 0
    for batch in family.batches(1, 4):
        meter.begin()
        try:
            with plan.precision():
                value = family.loss(model, {k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()})
            value.backward()
        finally:
            meter.end()
        del value
        peak = max(peak, meter.ledger.peak)
    return peak
