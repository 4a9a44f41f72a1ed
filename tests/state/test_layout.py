"""Copies lie as what they are copies of; gaps are bounded, and do not travel."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hydra_ext.state.layout import Layout, copied, order_of
from support.pipeline.pipeline_links import through_a_link

MEMORY = torch.arange(30_000, dtype=torch.float64)


def random_view(chance: random.Random) -> Tensor:
    """Of any sizes, in any order, with gaps and strides of 0."""
    size = [chance.choice((0, 1, 2, 3, 3, 5, 5, 7)) for _ in range(chance.randrange(5))]
    stride, step = [0] * len(size), chance.choice((1, 1, 1, 2, 9))
    for dimension in chance.sample(range(len(size)), len(size)):
        if chance.random() < 0.8:
            stride[dimension] = step
            step = max(1, step * size[dimension]) + chance.choice((0, 0, 0, 1, 2, 8, 40))
    if sum(n * s for n, s in zip(size, stride, strict=True)) > 29_000:
        return random_view(chance)
    return MEMORY.as_strided(size, stride, chance.randrange(20))


def check(got: Tensor, wanted: Tensor, layout: Layout) -> None:
    where = (wanted.size(), wanted.stride(), got.stride())
    assert torch.equal(got, wanted), where
    assert got.stride() == layout.stride, where
    assert not got.numel() or got.data_ptr() % 64 == wanted.data_ptr() % 64, where
    assert not got._is_view()


def test_copies_lie_as_the_tensors_do() -> None:
    chance = random.Random(0)
    kept = 0
    for _ in range(3000):
        tensor = random_view(chance)
        layout = Layout.of(tensor)
        kept += layout.stride == tensor.stride()
        check(copied(tensor), tensor, layout)
        check(through_a_link(tensor), tensor, layout)
        assert order_of(copied(tensor)) == order_of(tensor)
        distinct = len(MEMORY.long().as_strided(tensor.size(), tensor.stride()).unique())
        assert layout.packed.extent == distinct
        assert layout.extent <= 10 * distinct, (tensor.size(), tensor.stride())  # short rows: up to 64 bytes between
    assert kept > 1500


def test_a_narrow_part_of_something_large_is_closed_up_and_stays_aligned() -> None:
    tensor = torch.arange(50.0 * 1000 * 7).view(50, 1000, 7)[:, 3, 1:6]
    layout = Layout.of(tensor)
    (row, element), before = layout.stride, tensor.stride(0)
    assert element == 1
    assert 5 < row < 5 + 1 + 16
    assert row % 16 == before % 16
    check(copied(tensor), tensor, layout)
    assert Layout.of(tensor[:, ::2]).stride[1] == 2


def test_dimensions_that_overlap_lie_as_they_did_unless_that_takes_room() -> None:
    windows = torch.arange(200.0).unfold(0, 8, 3)[1:]
    layout = Layout.of(windows)
    assert layout.stride == windows.stride()
    assert layout.packed.extent < 200 < windows.numel()
    check(copied(windows), windows, layout)
    check(through_a_link(windows), windows, layout)
    apart = torch.arange(200.0).as_strided((2, 2, 2), (100, 1, 1))
    assert copied(apart).is_contiguous()
    assert torch.equal(through_a_link(apart), apart)


def test_what_is_no_plain_memory_is_cloned() -> None:
    conjugate = torch.randn(4, 6, dtype=torch.complex64)[:, ::2].conj()
    assert torch.equal(copied(conjugate), conjugate.resolve_conj())
    assert torch.equal(through_a_link(conjugate), conjugate.resolve_conj())
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(copied(sparse).to_dense(), torch.eye(4))


def test_a_copy_of_a_parameter_is_a_tensor_that_is_not_trained() -> None:
    found = copied(torch.nn.Parameter(torch.ones(3)))
    assert type(found) is Tensor
    assert not found.requires_grad
