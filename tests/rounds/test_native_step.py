"""run.step with an optimizer of hydra_ext.optim: clipping folded into an update that runs behind the next forward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, optim
from hydra_ext.errors import StateError
from support.benches import Outcome, assert_same
from support.runtime.native import LAYERS, WIDTH, stack, state
from support.runtime.outcomes import POISONED

STEPS = 4
MICROBATCHES = 3
BATCHES = torch.randn(STEPS, MICROBATCHES, 8, WIDTH, generator=torch.Generator().manual_seed(1))


def budget(model: nn.Module) -> int:
    return 3 * sum(parameter.nbytes for parameter in model.parameters()) // LAYERS + 2**16


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Outcome:
    seen: Outcome = []
    dtype = next(model.parameters()).dtype
    for batches in BATCHES.to(dtype):
        for batch in batches:
            loss = model(batch).pow(2).mean()
            (loss / MICROBATCHES).backward()
            seen.append(loss.detach().clone())
        seen.append(optim.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("max_norm", [1e-3, 1e9], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: optim.AdamW(parameters, lr=1e-2),
        lambda parameters: optim.AdamW(parameters, lr=1e-2, master="fp32", moments=torch.bfloat16),
        lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9),
    ],
    ids=["adamw", "adamw-bf16-moments", "sgd"],
)
def test_is_the_plain_loop_with_our_clipping_to_the_bit(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, max_norm: float
) -> None:
    plain, model = stack(dtype), stack(dtype)
    ours, theirs = make(model.parameters()), make(plain.parameters())
    expected = loop(plain, theirs, max_norm)
    seen: Outcome = []
    with hydra_ext.offload(
        model, ours, budget=budget(model), activations=None, checks=Checks(poison_hosts=True)
    ) as run:
        for batches in BATCHES.to(dtype):
            out = run.step(list(batches), lambda batch: model(batch).pow(2).mean(), max_norm=max_norm)
            assert out.grad_norm is not None
            assert not out.skipped
            seen += [*out.losses, out.grad_norm]
        report = run.report()
        assert report.deferred_updates == STEPS
        assert report.rounds >= STEPS
        assert report.refusals == report.fallbacks == 0
        assert report.evictions > 0
        assert f"updates  {STEPS} behind the next forward" in str(report)
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("native", [True, False])
def test_without_an_update_the_gradients_wait_for_the_step_of_the_caller(native: bool) -> None:
    plain, model = stack(), stack()
    make = optim.AdamW if native else torch.optim.AdamW
    ours, theirs = make(model.parameters(), lr=1e-2), make(plain.parameters(), lr=1e-2)
    expected, seen, figures = loop(plain, theirs, 1e-3), list[Any](), list[hydra_ext.StepFigures]()
    with hydra_ext.offload(model, ours, budget=budget(model), activations=None, checks=POISONED) as run:
        run.on_step(figures.append)
        for number, batches in enumerate(BATCHES):
            out = run.step(list(batches), lambda batch: model(batch).pow(2).mean(), update=False)
            assert (out.grad_norm, out.skipped, run.steps, len(figures)) == (None, False, number, number)
            with pytest.raises(StateError, match="has a gradient that no step has used"):
                run.save("nowhere")
            seen += [*out.losses, optim.clip_grad_norm_(model.parameters(), 1e-3)]
            ours.step()
            ours.zero_grad()
        assert run.report().rounds >= STEPS
        with pytest.raises(ValueError, match="leave out max_norm="):
            run.step(list(BATCHES[0]), lambda batch: model(batch).pow(2).mean(), update=False, max_norm=1.0)
    assert [each.step for each in figures] == [1, 2, 3, 4]
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_skips_the_step_before_anything_is_touched(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = stack(), stack()
    ours, theirs = optim.AdamW(model.parameters(), lr=1e-2), optim.AdamW(plain.parameters(), lr=1e-2)
    loop(plain, theirs, 1.0)
    with hydra_ext.offload(model, ours, budget=budget(model)) as run:
        for step, batches in enumerate(BATCHES):
            if step == 2:
                broken = batches.clone()
                broken[1, 0, 0] = bad
                before = state(model, ours)
                with caplog.at_level(logging.WARNING):
                    out = run.step(list(broken), lambda batch: model(batch).pow(2).mean(), max_norm=1.0)
                assert out.skipped
                assert "this step is skipped" in caplog.text
                assert all(parameter.grad is None for parameter in model.parameters())
                assert_same(before, state(model, ours))
            run.step(list(batches), lambda batch: model(batch).pow(2).mean(), max_norm=1.0)
    assert_same(state(plain, theirs), state(model, ours))


def test_gradients_of_parameters_that_are_not_stepped_are_scaled_in_place() -> None:
    def rest(model: nn.Sequential) -> list[nn.Parameter]:
        return [parameter for layer in model[2:] for parameter in layer.parameters()]

    plain, model = stack(), stack()
    ours, theirs = optim.SGD(rest(model), lr=1e-2), optim.SGD(rest(plain), lr=1e-2)
    for batch in BATCHES[0]:
        (plain(batch).pow(2).mean() / MICROBATCHES).backward()
    optim.clip_grad_norm_(plain.parameters(), 1e-3)
    theirs.step()
    theirs.zero_grad()
    with hydra_ext.offload(model, ours, budget=budget(model)) as run:
        run.step(list(BATCHES[0]), lambda batch: model(batch).pow(2).mean(), max_norm=1e-3)
    gradients = [["none" if p.grad is None else p.grad for p in one.parameters()] for one in (plain, model)]
    assert_same(*gradients)
    assert_same(state(plain, theirs), state(model, ours))


def test_a_norm_that_is_infinite_skips_the_step_too() -> None:
    """No gradient is NaN: scaled by one over infinity they would become it."""
    model = stack()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    with hydra_ext.offload(model, optimizer, budget=budget(model)) as run:

        def step() -> hydra_ext.StepOutput:
            return run.step(list(BATCHES[0]), lambda batch: model(batch).pow(2).mean(), max_norm=1.0)

        assert not step().skipped
        before = state(model, optimizer)
        handle = model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        out = step()
        handle.remove()
        assert out.skipped
        assert out.grad_norm is not None
        assert out.grad_norm.isposinf()
        assert_same(before, state(model, optimizer))
        assert not step().skipped


def test_a_step_without_a_norm_is_not_scaled_by_the_norm_of_the_one_before() -> None:
    plain, model = stack(), stack()
    theirs, ours = (optim.SGD(each.parameters(), lr=1e-1) for each in (plain, model))
    norms = (1e-3, None, None)
    for batch, max_norm in zip(BATCHES[0], norms, strict=True):
        plain(batch).pow(2).mean().backward()
        if max_norm is not None:
            optim.clip_grad_norm_(plain.parameters(), max_norm)
        theirs.step()
        theirs.zero_grad()
    with hydra_ext.offload(model, ours, budget=budget(model), checks=Checks(poison_hosts=True)) as run:
        for batch, max_norm in zip(BATCHES[0][:2], norms, strict=False):
            run.step([batch], lambda one: model(one).pow(2).mean(), max_norm=max_norm)
        model(BATCHES[0][2]).pow(2).mean().backward()
        ours.step()
        ours.zero_grad()
        assert run.report().deferred_updates == 3
    assert_same(state(plain, theirs), state(model, ours))
