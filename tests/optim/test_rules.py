"""What a step computes: the documented recurrence to the bit, torch's optimizers closely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hydra_ext
from hydra_ext import _C
from hydra_ext.optim import SGD, Adam, AdamW
from hydra_ext.optim.host_optimizer import HostOptimizer
from support.recurrences import AdamRecurrence, SgdRecurrence, half_up
from support.updates import gradient_like, parameter, same_bits, update

pytestmark = pytest.mark.every_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ADAM = {"lr": 1e-2, "betas": (0.8, 0.98), "eps": 1e-6, "weight_decay": 0.1}
# A name, our optimizer, torch's, the recurrence.
RULES: dict[str, tuple[type[HostOptimizer], type[torch.optim.Optimizer], Callable[..., Any], dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, AdamRecurrence, ADAM),
    "adam": (Adam, torch.optim.Adam, lambda w, **o: AdamRecurrence(w, **o, decoupled=False), ADAM),
    "adam without decay": (Adam, torch.optim.Adam, AdamRecurrence, {"lr": 1e-2}),
    "sgd": (SGD, torch.optim.SGD, SgdRecurrence, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (SGD, torch.optim.SGD, SgdRecurrence, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": (SGD, torch.optim.SGD, SgdRecurrence, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ten_steps_are_the_recurrence_bit_for_bit(rule: str, dtype: torch.dtype, gradient_dtype: torch.dtype) -> None:
    ours, _, make_recurrence, options = RULES[rule]
    weights = parameter((37, 5), dtype)
    optimizer = ours([weights], **options)
    recurrence = make_recurrence(weights.detach().float().clone().numpy(), **options)
    for step in range(10):
        gradient = gradient_like(weights, step, gradient_dtype)
        update(optimizer, [(weights, gradient)])
        recurrence.update(gradient.float().numpy())
    exact = torch.from_numpy(recurrence.weights)
    assert same_bits(optimizer.master(weights), exact)
    assert same_bits(weights, half_up(exact) if dtype == torch.bfloat16 else exact.to(dtype))


@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_steps_stay_as_near_to_fp64_as_torch_does(rule: str) -> None:
    ours, torchs, _, options = RULES[rule]
    weights = {kind: parameter((200,)) for kind in ("ours", "torch")}
    weights["exact"] = nn.Parameter(parameter((200,)).detach().double())
    optimizers = [
        ours([weights["ours"]], **options),
        torchs([weights["torch"]], **options),
        torchs([weights["exact"]], **options),
    ]
    for step in range(100):
        for each in weights.values():
            each.grad = gradient_like(each, step, torch.float32).to(each.dtype)
        for optimizer in optimizers:
            optimizer.step()
    error = {kind: (weights[kind].double() - weights["exact"]).abs().max().item() for kind in ("ours", "torch")}
    assert error["ours"] <= max(1e-6, 3 * error["torch"])


@pytest.mark.parametrize("instructions", _C.supported_instruction_sets(), ids=lambda chosen: chosen.name)
def test_a_plan_gives_the_same_whatever_instructions_and_threads(instructions: _C.InstructionSet) -> None:
    def run(plan: _C.TensorPlan, pool: _C.ThreadPool) -> list[torch.Tensor]:
        weights, first, second = (parameter((100_003,), torch.bfloat16, seed).detach() for seed in range(3))
        lower = torch.arange(100_003).remainder(65_536).sub(32_768).to(torch.int16)
        step = _C.AdamStep(
            learning_rate=1e-2, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, decoupled=True, step=2
        )
        gradient = gradient_like(weights, 3)
        second.abs_()
        plan.add(step, weights, gradient, master=lower, first_moment=first, second_moment=second, seed=5)
        plan.run(pool, 0.7)
        return [weights, lower, first, second]

    expected = run(_C.TensorPlan(_C.InstructionSet.PORTABLE), _C.ThreadPool(1))
    for threads in (1, 2, 3):
        got = run(_C.TensorPlan(instructions), _C.ThreadPool(threads))
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A shape, and the orders in which weights and gradient lie in memory."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    orders = st.permutations(range(len(shape)))
    return shape, draw(orders), draw(orders)


def lying(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same tensor with its dimensions in that order in memory."""
    inverse = [order.index(dimension) for dimension in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


@settings(deadline=None)
@given(
    layouts(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(sorted(RULES)),
    st.sampled_from(["split", "fp32"]), st.floats(2**-7, 2.0, width=32),
)  # fmt: skip
def test_shape_types_and_memory_order_do_not_matter(
    layout: tuple[list[int], list[int], list[int]],
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    rule: str,
    master: str,
    scale: float,
) -> None:
    shape, order, gradient_order = layout
    ours, _, make_recurrence, options = RULES[rule]
    weights = nn.Parameter(lying(parameter(shape, dtype).detach(), order))
    optimizer = ours([weights], **options, master=master)
    recurrence = make_recurrence(
        weights.detach().float().clone(memory_format=torch.contiguous_format).numpy(), **options
    )
    for step in range(2):
        gradient = lying(gradient_like(weights, step, gradient_dtype), gradient_order)
        update(optimizer, [(weights, gradient)], scale)
        recurrence.update((gradient * scale).float().contiguous().numpy())
    exact = torch.from_numpy(np.asarray(recurrence.weights)).reshape(shape)
    assert same_bits(optimizer.master(weights).contiguous(), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_is_what_scaling_the_gradient_before_would_have_been(dtype: torch.dtype) -> None:
    before, folded = parameter((1000,), dtype), parameter((1000,), dtype)
    gradient = gradient_like(before, 3)
    update(AdamW([before]), [(before, gradient.clone().mul_(0.0123))])
    update(AdamW([folded]), [(folded, gradient)], 0.0123)
    assert same_bits(before, folded)


def test_the_update_is_hydra_exts() -> None:
    assert hydra_ext.optim.AdamW is AdamW
