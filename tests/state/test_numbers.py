"""Numbers are compared and put back bit by bit where they are plain; other tensors are known by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hydra_ext.state import numbers
from support.runtime.odd_tensors import ODD, PLAIN

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_copy_of_plain_numbers_is_equal_to_them(make: Callable[[], Tensor]) -> None:
    tensor = make()
    version = numbers.version_of(tensor)
    copy = numbers.on_host(tensor)
    assert numbers.has_plain_numbers(tensor)
    assert numbers.is_small(tensor)
    assert copy is not tensor
    assert not numbers.differ(tensor, copy)
    numbers.put(tensor, copy)
    assert numbers.version_of(tensor) == version  # nothing was written


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_other_tensors_differ_from_all_but_themselves(make: Callable[[], Tensor]) -> None:
    tensor, other = make(), make()
    assert not numbers.has_plain_numbers(tensor)
    assert not numbers.is_small(tensor)
    assert not numbers.differ(tensor, tensor)
    assert numbers.differ(tensor, other)


@pytest.mark.parametrize("name", ["complex", "conjugate", "negative", "inference"])
def test_what_was_written_is_put_back(name: str) -> None:
    tensor = PLAIN[name]()
    copy = numbers.on_host(tensor)
    with torch.inference_mode(tensor.is_inference()):
        tensor.add_(1)
    assert numbers.differ(tensor, copy)
    numbers.put(tensor, copy)
    assert not numbers.differ(tensor, copy)


@pytest.mark.parametrize("name", ["sparse", "quantized", "nested", "subclass"])
def test_what_was_written_to_other_tensors_is_put_back(name: str) -> None:
    tensor = ODD[name]()
    copy, version = numbers.on_host(tensor), tensor._version
    tensor.copy_(tensor.detach().clone().zero_() if name == "sparse" else ODD[name]())
    assert numbers.may_have_changed(tensor, version)
    numbers.put(tensor, copy)
    one, other = (value.dequantize() if value.is_quantized else value for value in (tensor, copy))
    parts = [value.unbind() if value.is_nested else [value.to_dense()] for value in (one, other)]
    assert all(map(torch.equal, *parts))


def test_nan_are_equal_to_themselves_and_zeros_of_two_signs_are_not() -> None:
    assert not numbers.differ(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert numbers.differ(torch.tensor([0.0]), torch.tensor([-0.0]))
