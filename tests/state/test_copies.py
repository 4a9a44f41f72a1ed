"""Copies of several tensors share memory with each other exactly where the tensors do, and lie as they do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_ext.errors import StateError
from hydra_ext.state.copies import copied_together, sharing

BYTES = 4096
DTYPES = (torch.int32, torch.int64, torch.uint8)


def addresses(tensor: Tensor) -> set[int]:
    """Of all bytes of its elements."""
    found = {tensor.data_ptr()}
    for number, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = {each + index * step * tensor.itemsize for each in found for index in range(number)}
    return {each + byte for each in found for byte in range(tensor.itemsize)}


def random_views(chance: random.Random) -> list[Tensor]:
    """Of one memory: of several types, in any order, with gaps, strides of 0 and dimensions that overlap."""
    memory = torch.arange(BYTES).to(torch.uint8)
    found: list[Tensor] = []
    wide = chance.choice((24, 64, 320, 640))  # bytes: of rows that several of them are parts of
    while len(found) < chance.randrange(2, 5):
        whole = memory.view(chance.choice(DTYPES))
        rows = wide // whole.itemsize
        size = (chance.randrange(1, 5), chance.randrange(1, chance.choice((4, 4, rows + 1))), chance.choice((1, 1, 2)))
        stride = (chance.choice((rows, rows, 0, 2 * rows)), chance.choice((1, 1, 2)), chance.choice((0, 1, rows)))
        order = chance.sample(range(3), 3)
        size, stride = tuple(size[d] for d in order), tuple(stride[d] for d in order)
        offset = chance.randrange(0, 64 // whole.itemsize)
        extent = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if offset + extent < len(whole):
            found.append(whole.as_strided(size, stride, offset))
    return found


def copies_of(tensors: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    groups = sharing(tensors)
    return groups, [copied_together(group) for group in groups]


def test_whatever_is_written_to_one_shows_in_the_others_as_it_would() -> None:
    chance = random.Random(0)
    together = apart = closer = 0
    for _ in range(400):
        tensors = random_views(chance)
        groups, copied = copies_of(tensors)
        assert sorted(id(t) for group in groups for t in group) == sorted(map(id, tensors))
        where = [addresses(tensor) for tensor in tensors]
        of_group = {id(t): number for number, group in enumerate(groups) for t in group}
        for one, mine in zip(tensors, where, strict=True):
            for other, others in zip(tensors, where, strict=True):
                assert of_group[id(one)] == of_group[id(other)] or not mine & others
        together += any(len(group) > 1 for group in groups)
        apart += len(groups) > 1
        for group, made in zip(groups, copied, strict=True):
            closer += len(group) > 1 and made[0].stride() != group[0].stride()
            for tensor, copy in zip(group, made, strict=True):
                assert torch.equal(copy, tensor)
                assert len(group) == 1 or copy.data_ptr() % 64 == tensor.data_ptr() % 64
        for group, made in zip(groups, copied, strict=True):
            if len(group) == 1:
                continue  # alone it may lose dimensions that overlap
            for tensor, copy in zip(group, made, strict=True):
                for each in (tensor, copy):
                    each[tuple(slice(n // 2, n // 2 + 1) for n in each.shape)].fill_(77)
                for before, after in zip(group, made, strict=True):
                    assert torch.equal(after, before), (before.shape, before.stride())
    assert together > 100
    assert apart > 50
    assert closer > 20


def test_columns_that_lie_beside_each_other_do_not_meet() -> None:
    whole = torch.randn(50, 1000)
    assert len(sharing([whole[:, 3:5], whole[:, 5:9], whole[:, 900]])) == 3
    assert len(sharing([whole[:, 3:6], whole[:, 5:9]])) == 1
    assert len(sharing([whole[:20], whole[20:]])) == 2
    assert len(sharing([whole, whole])) == 1
    assert len(sharing([whole, whole.clone()])) == 2


def test_of_something_large_no_more_is_copied_than_what_lies_near() -> None:
    series = torch.randn(50, 100_000)
    x, y = series[:, 7:15], series[:, 8:16]
    first, second = copied_together([x, y])
    memory = first.untyped_storage()
    assert memory._cdata == second.untyped_storage()._cdata
    assert memory.nbytes() <= 50 * (9 * 4 + 4 + 64) + 64
    assert first.stride(0) % 16 == x.stride(0) % 16
    assert first.data_ptr() % 64 == x.data_ptr() % 64
    tokens = torch.arange(10**6)
    ids, _ = copied_together([tokens[5:13], tokens[6:14]])
    assert ids.untyped_storage().nbytes() <= 9 * 8 + 64


def test_views_stay_views_for_autograd() -> None:
    whole = torch.randn(3, 9)
    x, y, other = copied_together([whole[:, :8], whole[:, 1:], whole.data[:, 2:]])
    before = y._version, other._version
    weight = torch.ones((), requires_grad=True)
    x.mul_(weight)
    assert y.requires_grad
    assert not other.requires_grad
    assert (y._version, other._version) == (before[0] + 1, before[1])
    y.sum().backward()
    torch.testing.assert_close(weight.grad, whole[:, 1:8].sum())
    base, part = copied_together([whole, whole[1]])
    assert part._base is base


def test_arrays_of_one_memory_are_one_memory() -> None:
    tokens = np.arange(100)
    x, y = torch.from_numpy(tokens[:64]), torch.from_numpy(tokens[1:65])
    assert x.untyped_storage()._cdata != y.untyped_storage()._cdata
    ((first, second),) = [copied_together(group) for group in sharing([x, y])]
    first[1] = -1
    assert second[0] == -1
    assert x[1] == 1


def test_what_is_lazy_and_classes_are_kept() -> None:
    class Named(Tensor):
        label: str

    numbers = torch.randn(4, dtype=torch.complex64)
    first, second, negated = copied_together([numbers, numbers.conj(), numbers.conj().imag])
    assert second.is_conj()
    assert negated.is_neg()
    assert torch.equal(second, numbers.conj())
    assert torch.equal(negated, numbers.conj().imag)
    first.zero_()
    assert not second.abs().sum()
    named = torch.randn(4).as_subclass(Named)
    named.label = "mine"
    view, made = copied_together([named.as_subclass(Tensor), named])
    assert type(made) is Named
    assert made.label == "mine"
    view.fill_(3)
    assert made.tolist() == [3, 3, 3, 3]


def test_what_has_no_plain_memory_is_alone() -> None:
    sparse = torch.eye(4).to_sparse()
    nothing = torch.empty(0)
    assert [len(group) for group in sharing([sparse, sparse.transpose(0, 1), nothing, nothing[:]])] == [1, 1, 1, 1]
    assert sharing([torch.ones(2, device="meta")])


def test_elements_at_odd_places_are_refused() -> None:
    array = np.frombuffer(bytearray(64), dtype=np.uint8)
    odd = torch.from_numpy(array[1:33].view(np.float32))
    even = torch.from_numpy(array[:32].view(np.float32))
    with pytest.raises(StateError, match="do not lie at multiples"):
        copied_together([odd, even])
