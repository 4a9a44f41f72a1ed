"""Threads share what lanes add and convert on the host, and each number has the bits of one call on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hydra_ext

TASK = 32 * 2**10  # numbers
PIECE = 4 * 2**20  # bytes
THREADS = 3
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Weight(nn.Module):
    """Shows its weight, so that a gradient of the result is the weight's, bit for bit."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers)

    def forward(self) -> Tensor:
        return self.weight.clone()


@pytest.fixture
def several_threads() -> Iterator[None]:
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(BITS[numbers.itemsize])


def any_numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of every kind, NaNs with a payload and denormals among them, also where tasks and pieces end."""
    generator = torch.Generator().manual_seed(seed)
    size = BITS[dtype.itemsize]
    limits = torch.iinfo(size)
    numbers = torch.randint(limits.min, limits.max, (count,), dtype=size, generator=generator).view(dtype)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, torch.finfo(dtype).smallest_normal / 4])
    for end in range(0, count, TASK):
        place = max(0, end - 2)
        numbers[place : place + 4] = special.to(dtype)[torch.randint(5, (4,), generator=generator)][: count - place]
    return numbers


@st.composite
def counts(draw: st.DrawFn, itemsize: int) -> int:
    length = draw(st.sampled_from([TASK, PIECE // itemsize]))
    return draw(st.integers(1, 3)) * length + draw(st.sampled_from([-1, 0, 1, 17]))


def sum_on_one_thread(numbers: list[Tensor], dtype: torch.dtype) -> Tensor:
    torch.set_num_threads(1)
    total = numbers[0].to(dtype, copy=True)
    for each in numbers[1:]:
        total.add_(each.to(dtype))
    torch.set_num_threads(THREADS)
    return total


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("face", [None, *FLOATS], ids=str)
@pytest.mark.parametrize("host", FLOATS, ids=str)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_weights_and_sums_have_the_bits_of_one_call_on_one_thread(
    host: torch.dtype, face: torch.dtype | None, data: st.DataObject
) -> None:
    computed = face or host
    count = data.draw(counts(computed.itemsize))
    seed = data.draw(st.integers(0, 2**31))
    weight = any_numbers(count, host, seed)
    gradients = [any_numbers(count, computed, seed + each) for each in (1, 2, 3)]
    model = nn.Sequential(Weight(weight.clone()))
    with hydra_ext.offload(model, budget="256MiB", param_dtype=face, activations=None):
        for gradient in gradients:
            seen = model[0]()
            seen.backward(gradient.clone())
        assert torch.equal(bits(seen.detach()), bits(sum_on_one_thread([weight], computed)))
        found = model[0].weight.grad
        assert found is not None
        assert torch.equal(bits(found), bits(sum_on_one_thread(gradients, host)))


def threads_now() -> set[str]:
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def start_torchs_own_threads() -> None:
    torch.ones(4 * TASK) + 1


@pytest.mark.usefixtures("several_threads")
def test_a_large_gradient_is_added_by_as_many_threads_as_torch_has() -> None:
    count = PIECE // 4 + 1
    model = nn.Sequential(Weight(torch.zeros(count)))
    start_torchs_own_threads()
    with hydra_ext.offload(model, budget="64MiB", activations=None):
        model[0]().backward(torch.ones(count))  # a copy: nothing is added
        before = threads_now()
        model[0]().backward(torch.ones(count))
        assert len(threads_now() - before) == THREADS - 1  # and the lane's own


@pytest.mark.usefixtures("several_threads")
def test_a_large_weight_is_converted_by_as_many_threads_as_torch_has() -> None:
    model = nn.Sequential(Weight(torch.zeros(4 * TASK)))
    start_torchs_own_threads()
    with hydra_ext.offload(model, budget="64MiB", param_dtype=torch.bfloat16, activations=None):
        before = threads_now()
        model[0]()
        assert len(threads_now() - before) == THREADS - 1


@pytest.mark.usefixtures("several_threads")
def test_what_one_task_holds_starts_no_thread() -> None:
    model = nn.Sequential(Weight(torch.zeros(TASK)))
    start_torchs_own_threads()
    with hydra_ext.offload(model, budget="64MiB", param_dtype=torch.bfloat16, activations=None):
        before = threads_now()
        for _ in range(2):
            model[0]().backward(torch.ones(TASK, dtype=torch.bfloat16))
        assert threads_now() == before
