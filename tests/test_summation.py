"""The bound that sums in another order are held to is kept by every order, and not by a sum that lacks a summand."""

import itertools

import pytest
import torch
from torch import nn

from support.summation import Summands, assert_sums_alike


def test_every_order_keeps_the_bound_and_a_missing_summand_does_not() -> None:
    torch.manual_seed(0)
    leaf = nn.Parameter(torch.randn(50))
    inputs = torch.randn(5, 50).mul(torch.logspace(-3, 3, 5)[:, None])
    summands = Summands()
    for pair in (inputs[:2], inputs[2:]):
        loss = torch.stack([(leaf * values).sum() for values in pair]).sum()
        summands.watch([loss], {"leaf": leaf})
        loss.backward()
    assert summands.counts == {"leaf": 5}
    assert leaf.grad is not None
    orders = [sum(inputs[list(order)], torch.zeros(50)) for order in itertools.permutations(range(5))]
    assert any(not torch.equal(leaf.grad, other) for other in orders)
    for other in orders:
        assert_sums_alike(leaf.grad, other, summands.bound("leaf"), "leaf")
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_sums_alike(leaf.grad, leaf.grad - inputs[1], summands.bound("leaf"), "leaf")
