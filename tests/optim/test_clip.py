"""Clipping by the deterministic norm, and its parity with an update that has the factor folded in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hydra_ext import _C
from hydra_ext.errors import InvalidOptimizer, NonFiniteNorm
from hydra_ext.optim import AdamW, clip_grad_norm_
from support.updates import gradient_like, parameter, same_bits, update


def with_gradients(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = [parameter(shape, dtype) for shape in ((300, 500), (7,), (), (0,), (20, 3))]
    for ordinal, each in enumerate(parameters):
        each.grad = gradient_like(each, ordinal)
    parameters.append(parameter((4,), dtype))  # has none
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_and_gradients_are_those_of_torch_within_a_millionth(max_norm: float) -> None:
    ours, theirs = with_gradients(), with_gradients()
    norm = clip_grad_norm_(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


def test_below_the_limit_gradients_stay_as_they_are() -> None:
    parameters = with_gradients()
    before = [each.grad.clone() for each in parameters[:-1]]
    clip_grad_norm_(parameters, 1e6)
    assert all(same_bits(each.grad, old) for each, old in zip(parameters[:-1], before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_clipping_first_equals_the_factor_folded_into_the_update(dtype: torch.dtype) -> None:
    clipped, folded = with_gradients(dtype)[:-1], with_gradients(dtype)[:-1]
    first, second = AdamW(clipped), AdamW(folded)
    for _ in range(3):
        norm = _C.norm_of_sums(_C.sums_of_squares([each.grad for each in folded], _C.ThreadPool(2)))
        update(second, [(each, each.grad) for each in folded], _C.clip_factor(norm, 0.3))
        for each, other in zip(clipped, folded, strict=True):
            each.grad = other.grad.clone()
        clip_grad_norm_(clipped, 0.3)
        first.step()
    assert all(same_bits(a, b) for a, b in zip(clipped, folded, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=5), st.integers(1, 3))
def test_the_norm_is_the_same_whatever_threads_and_instructions(counts: list[int], threads: int) -> None:
    gradients = [gradient_like(torch.empty(count), ordinal) for ordinal, count in enumerate(counts)]
    expected = _C.sums_of_squares(gradients, _C.ThreadPool(1), _C.InstructionSet.PORTABLE)
    for instructions in _C.supported_instruction_sets():
        assert _C.sums_of_squares(gradients, _C.ThreadPool(threads), instructions) == expected
    assert expected == pytest.approx([gradient.double().square().sum().item() for gradient in gradients], rel=1e-12)


def test_a_gradient_that_lies_otherwise_gives_the_same_norm_and_is_scaled_where_it_lies() -> None:
    straight, otherwise = parameter((400, 300)), parameter((400, 300))
    straight.grad = gradient_like(straight, 1)
    otherwise.grad = straight.grad.t().contiguous().t()
    assert clip_grad_norm_(straight, 0.5).item() == clip_grad_norm_(otherwise, 0.5).item()
    assert otherwise.grad.stride() == (1, 400)
    assert torch.equal(straight.grad, otherwise.grad)


def test_a_gradient_with_gaps_in_memory_counts_by_its_elements() -> None:
    straight, gaps = parameter((50,)), parameter((50,))
    gaps.grad = gradient_like(torch.empty(100), 1)[::2]
    straight.grad = gaps.grad.clone()
    assert clip_grad_norm_(gaps, 0.5).item() == clip_grad_norm_(straight, 0.5).item()
    for weights in (gaps, straight):
        AdamW([weights]).step()
    assert same_bits(gaps, straight)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_told(bad: float) -> None:
    parameters = with_gradients()
    parameters[0].grad[3, 3] = bad
    before = parameters[1].grad.clone()
    with pytest.raises(NonFiniteNorm, match=r"leave out this step"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert same_bits(parameters[1].grad, before)
    assert not math.isfinite(clip_grad_norm_(parameters, 1.0).item())
    twin = with_gradients()
    twin[0].grad[3, 3] = bad
    nn.utils.clip_grad_norm_(twin, 1.0)
    torch.testing.assert_close(parameters[1].grad, twin[1].grad, equal_nan=True)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_([parameter((3,))], 1.0).item() == 0.0
    assert clip_grad_norm_(iter([]), 1.0).item() == 0.0


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InvalidOptimizer, match="sparse"):
        clip_grad_norm_(table.parameters(), 1.0)
