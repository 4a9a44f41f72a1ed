"""Digests of tensors depend on every number and its place, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hydra_ext import _C

BASE = torch.arange(2.0, 2.0 + 6 * 8 * 10).reshape(6, 8, 10)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "rows with gaps": lambda t: t[:, 2:5],
    "columns with gaps": lambda t: t[..., 1:4],
    "every other": lambda t: t[::2, :, ::2],
    "expanded": lambda t: t[:, :1].expand(6, 8, 10),
    "one number": lambda t: t[3, 4, 5],
    "part of a transposed one": lambda t: t.transpose(0, 1)[1:3],
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.complex128]


def equal(one: Tensor, other: Tensor) -> bool:
    digests = _C.SavedDigest([]), _C.SavedDigest([])
    for digest, tensor in zip(digests, (one, other), strict=True):
        assert digest.add(tensor)
        assert digest.count == 1
    reduced = torch.equal(_C.reduced_by_place(one), _C.reduced_by_place(other))
    assert digests[0].equals(digests[1]) == (reduced and one.shape == other.shape)
    return digests[0].equals(digests[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_and_its_place_counts(layout: str, dtype: torch.dtype) -> None:
    def made() -> Tensor:
        return (BASE % 2 > 0 if dtype is torch.bool else BASE.to(dtype)).clone()

    base = made()
    view = LAYOUTS[layout](base)
    hidden = torch.ones_like(base, dtype=torch.bool)
    LAYOUTS[layout](hidden).fill_(False)  # what the view does not show
    other = made()
    other[hidden] = other.flatten()[0]
    assert equal(view, LAYOUTS[layout](other))
    distinct = torch.arange(base.numel()).reshape(base.shape)
    for place in LAYOUTS[layout](distinct).unique().tolist():
        other = made()
        changed = other.flatten()  # of a dense tensor: itself
        changed[place] = ~changed[place] if dtype is torch.bool else changed[place] + 1
        assert equal(view, LAYOUTS[layout](other)) == torch.equal(view, LAYOUTS[layout](other))


def test_numbers_that_only_change_places_are_seen() -> None:
    numbers = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    for shift in (1, 2, 4, 64, 256, 1 << 10, 1 << 17):
        assert not equal(numbers, numbers.roll(shift))
    halves = torch.zeros(1 << 12)
    halves[5], halves[5 + (1 << 11)] = 1.0, -1.0
    assert not equal(halves, halves.roll(1 << 11))


def test_large_ones_are_cut_and_each_part_counts() -> None:
    numbers = torch.randn(1_500_000, generator=torch.Generator().manual_seed(1))
    for place in (0, 262_143, 262_144, 1_048_575, 1_048_576, 1_499_999):
        other = numbers.clone()
        assert equal(numbers, other)
        other[place] += 1
        assert not equal(numbers, other)


@pytest.mark.parametrize("layout", ["dense", "columns with gaps", "expanded", "conjugated"])
def test_no_tensor_is_copied_as_a_whole(layout: str) -> None:
    """On the host nothing is copied, on a GPU a part whose size does not depend on the tensor's."""

    def taken(rows: int, reduce: Callable[[Tensor], object]) -> int:
        base = torch.zeros(rows, 2048)
        tensor = {
            "dense": lambda: base,
            "columns with gaps": lambda: base[:, ::2],
            "expanded": lambda: base[:, :1].expand(rows, 2048),
            "conjugated": lambda: torch.view_as_complex(base.view(rows, 1024, 2)).conj(),
        }[layout]()
        meter = _C.testing.Meter()
        meter.begin()
        try:
            reduce(tensor)
        finally:
            meter.end()
        return meter.ledger.peak

    assert taken(4096, lambda tensor: _C.SavedDigest([]).add(tensor)) == 0
    assert taken(2048, _C.reduced_by_place) == taken(4096, _C.reduced_by_place) > 0


def test_shapes_dtypes_and_order_count() -> None:
    zeros = torch.zeros(4, 6)
    assert not equal(zeros, torch.zeros(6, 4))
    assert not equal(torch.complex(zeros, zeros + 1), torch.complex(zeros, zeros + 1).conj())
    one, other = _C.SavedDigest([]), _C.SavedDigest([])
    for digest, tensors in ((one, (zeros, zeros + 1)), (other, (zeros + 1, zeros))):
        for tensor in tensors:
            digest.add(tensor)
    assert not one.equals(other)
    none, more = one.fresh(), one.fresh()
    more.add(torch.empty(0))
    assert not none.equals(more)


def test_of_parameters_it_counts_which_one() -> None:
    first, second = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))
    digests = [_C.SavedDigest([first, second])]
    digests += [digests[0].fresh() for _ in range(3)]
    for digest, tensor in zip(digests, (first, first.detach().t().t(), first.detach().t(), second), strict=True):
        digest.add(tensor)
    assert digests[0].equals(digests[1])
    assert not digests[0].equals(digests[3])
    with torch.no_grad():
        first.add_(1)  # is looked after by versions
    again = digests[0].fresh()
    again.add(first)
    assert again.equals(digests[0])


@pytest.mark.every_case
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "compressed rows", "nested", "quantised"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_compared_is_told(made: Callable[[], Tensor]) -> None:
    digest = _C.SavedDigest([])
    assert not digest.add(made())
    assert digest.count == 0
