"""Means of gradients over replicas: added in the order of the ranks, and few messages for many small gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.pipeline.pipeline_means import given, means, messages
from support.ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_means_are_added_in_the_order_of_the_ranks(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = []
    for tensors in zip(*(given(rank, dtype) for rank in range(size)), strict=True):
        total = tensors[0].clone()
        for other in tensors[1:]:
            total += other
        expected.append(total / size)
    for found in run_ranks(means, dtype, folder=tmp_path, size=size):
        assert all(map(torch.equal, found, expected))
        assert [each.shape for each in found] == [each.shape for each in expected]


@pytest.mark.parametrize(("width", "layers", "expected"), [(8, 20, 1), (800, 4, 4)])
def test_small_gradients_share_messages(width: int, layers: int, expected: int, tmp_path: Path) -> None:
    """Of layers of 2.4 MiB each two are too much for one message. A bias goes with the weight beside it."""
    assert run_ranks(messages, width, layers, folder=tmp_path) == [expected] * 2
