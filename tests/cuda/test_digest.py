"""Digests on a GPU: the number that operators give on the host, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hydra_ext import _C

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.complex128]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "columns with gaps": lambda t: t[..., 1:4],
    "every other": lambda t: t[::2, :, ::2],
    "expanded": lambda t: t[:, :1].expand(6, 8, 10),
    "one number": lambda t: t[3, 4, 5],
    "many dimensions": lambda t: t.reshape(2, 3, 2, 2, 2, 2, 5).transpose(0, 6).transpose(2, 4).transpose(1, 3),
    "conjugate": torch.conj,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_number_is_that_of_operators_on_the_host(layout: str, dtype: torch.dtype) -> None:
    numbers = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    on_host, on_device = LAYOUTS[layout](numbers), LAYOUTS[layout](numbers.cuda())
    assert on_host.stride() == on_device.stride()
    assert _C.reduced_by_place(on_device).item() == _C.reduced_by_place(on_host).item()


def test_numbers_may_be_late_on_the_current_stream() -> None:
    numbers = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0)).cuda()
    expected = _C.reduced_by_place(numbers * 2).item()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        assert _C.reduced_by_place(numbers * 2).item() == expected
