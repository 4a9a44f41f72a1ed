"""Random programs: the same gradients, or the same error, with a stash and without."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hydra_ext
from support.stash.saved_programs import INEXACT, OPERATIONS, POLICIES, SIDE, SavedProgram, Step, saved_programs
from support.stash.stashed import assert_empty, stashed


def outcome(program: SavedProgram, stash: hydra_ext.stash | None) -> tuple[str, Tensor | None]:
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(program.seed)).requires_grad_()
    with stash if stash is not None else nullcontext():
        loss = program.run(x)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error).partition(":")[0], None
    return "", x.grad


def compare(program: SavedProgram) -> hydra_ext.stash:
    stash = hydra_ext.stash(program.policy, budget=program.budget, device="simulated")
    (said, found), (wanted, expected) = outcome(program, stash), outcome(program, None)
    assert said == wanted
    if expected is not None:
        assert found is not None
        assert torch.equal(found, expected) or torch.equal(found.isnan(), expected.isnan())
    assert_empty(stash.report())
    return stash


@settings(deadline=None, max_examples=100)
@given(saved_programs())
def test_random_programs(program: SavedProgram) -> None:
    compare(program)


@pytest.mark.full
@settings(deadline=None, max_examples=3000)
@given(saved_programs())
def test_many_random_programs(program: SavedProgram) -> None:
    compare(program)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_saves_something(operation: str, policy: hydra_ext.Offload | hydra_ext.Compress) -> None:
    others = tuple(Step("sin", 0, False) for _ in range(2))
    stash = compare(SavedProgram((*others, Step(operation, 0, False), *others), None, 1, policy))
    assert stash.report().tensors > 0
    if operation in INEXACT and policy == hydra_ext.Compress(error=1e3) and operation != "linear and something else":
        assert stash.report().compressed > 0


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float64, torch.bfloat16, torch.complex128])
def test_any_type_comes_back(kind: torch.dtype) -> None:
    class Carries(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, carried: Tensor) -> Tensor:
            ctx.save_for_backward(carried)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            seen.append(ctx.saved_tensors[0])
            return gradients[0], None

    seen: list[Tensor] = []
    carried = torch.arange(2048).to(kind)
    x = torch.ones(2, requires_grad=True)
    stash = stashed()
    with stash:
        loss = Carries.apply(x, carried * 1 if kind != torch.bool else carried.clone()).sum()
    assert stash.report().intervals == 1
    loss.backward()
    assert torch.equal(seen[0], carried)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 100_000))
@settings(deadline=None, max_examples=50)
def test_the_budget_is_never_passed_by_more_than_what_is_being_saved(rows: list[int], budget: int) -> None:
    stash = stashed(budget=budget)
    x = torch.ones((), requires_grad=True)
    for _ in range(2):
        with stash:
            loss = sum(((x * torch.ones(number, 64)).exp().sum() for number in rows), x * 0)
        assert stash.report().held_bytes <= max(budget, 0)
        loss.backward()
    largest = max(rows) * 64 * 4
    assert stash.report().peak_held_bytes <= budget + largest
    assert_empty(stash.report())
