"""What users do inside a native optimizer's step, in hooks or in a ``step()`` of their own, is what it is in plain
training: they see the gradients that are applied, and what they write to the weights counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import hydra_ext
from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines
from support.pipeline.pipelines import Case


@torch.no_grad()
def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.clamp_(-0.3, 0.3)


def sign(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.sign_()


class Clamps(hydra_ext.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        clamp(self)


def hooked_after(parameters: Any) -> torch.optim.Optimizer:
    optimizer = pipelines.native_adamw(parameters)
    optimizer.register_step_post_hook(clamp)
    return optimizer


def hooked_before(parameters: Any) -> torch.optim.Optimizer:
    optimizer = pipelines.native_sgd(parameters)
    optimizer.register_step_pre_hook(sign)
    optimizer.register_step_pre_hook(clamp)
    return optimizer


def overridden(parameters: Any) -> torch.optim.Optimizer:
    return Clamps(parameters, lr=0.05, momentum=0.9)


def overridden_later(parameters: Any) -> torch.optim.Optimizer:
    optimizer = pipelines.native_sgd(parameters)
    native = optimizer.step

    def step(self: torch.optim.Optimizer) -> None:
        native()
        clamp(self)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


@contextmanager
def hooked_for_all() -> Iterator[None]:
    handle = register_optimizer_step_post_hook(clamp)
    try:
        yield
    finally:
        handle.remove()


def train(case: Case, stages: list[torch.nn.Module], fn: Callable[[Pipeline], Any] | None = None) -> list[Tensor]:
    """The losses."""
    with pipelines.pipeline_of(case, stages) as pipe:
        loss_of = pipelines.loss_of if fn is None else fn(pipe)
        outputs = [pipe.step(pipelines.data_of(case, n), loss_of, max_norm=case.max_norm) for n in range(case.steps)]
    return [torch.stack(list(output.losses)) for output in outputs]


def check(case: Case, fn: Callable[[Pipeline], Any] | None = None) -> None:
    stages = pipelines.make_stages(case.stages)
    losses = train(case, stages, fn)
    expected = pipelines.recurrence(case, 1 if case.schedule == "2bw" else 0)
    assert all(torch.equal(found, wanted) for found, wanted in zip(losses, expected.losses, strict=True))
    for index, stage in enumerate(stages):
        for weight, wanted in zip(stage.parameters(), expected.weights[index], strict=True):
            assert torch.equal(weight, wanted)


@pytest.mark.parametrize("make", [hooked_after, hooked_before, overridden, overridden_later])
@pytest.mark.parametrize(("schedule", "budget"), [("1f1b", None), ("2bw", None), ("2bw", 80_000)])
def test_what_users_do_inside_a_step_is_what_it_is_in_plain_training(
    make: Any, schedule: str, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pipelines.OPTIMIZERS, "watched", make)
    check(Case(schedule, stages=1, microbatches=2, optimizer="watched", budget=budget, max_norm=0.5, steps=6))


def test_hooks_of_all_optimizers_count_too() -> None:
    with hooked_for_all():
        check(Case("2bw", stages=2, microbatches=2, optimizer="native-adamw", max_norm=0.5, steps=6))


def test_who_hooks_himself_in_while_an_update_is_made_behind_does_not_spoil_it() -> None:
    case = Case("2bw", stages=1, microbatches=2, optimizer="native-adamw", steps=6)
    under_way = []

    def fn(pipe: Pipeline) -> Any:
        def loss_of(value: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
            pipelines.wait_for_gradients(pipe)
            if pipelines.begun_updates(pipe) and not under_way:
                under_way.extend(pipelines.begun_updates(pipe))
                pipe.optimizers[0].register_step_post_hook(lambda *_: None)
            return pipelines.loss_of(value, microbatch)

        return loss_of

    check(case, fn)
    assert under_way
