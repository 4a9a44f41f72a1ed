"""Compares operations in strips with the same operations on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hydra_ext import tiled


@dataclass(frozen=True)
class Outcome:
    """The result of a function of tensors, and the gradients of all tensors that require one, in order."""

    value: torch.Tensor
    gradients: list[torch.Tensor]


def outcome(function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], *, seed: int = 0) -> Outcome:
    """Runs a function forward, and backward with one random gradient."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    value = function(*leaves)
    gradient = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype)
    value.backward(gradient)
    return Outcome(value.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None])


def in_strips(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], *, rows: int, budget: str = "1GiB"
) -> Outcome:
    """Does the same inside ``tiled.strips``. Asserts that at least one operation ran in several strips."""
    with tiled.strips(budget=budget, rows=rows, device="simulated") as run:
        made = outcome(function, tensors)
    report = run.report()
    assert report.strips > report.operations > 0, "nothing was cut"
    return made


def assert_equal(made: Outcome, expected: Outcome) -> None:
    """Asserts equality to the last bit."""
    assert torch.equal(made.value, expected.value)
    assert len(made.gradients) == len(expected.gradients)
    for one, other in zip(made.gradients, expected.gradients, strict=True):
        assert torch.equal(one, other)


def assert_close(made: Outcome, expected: Outcome, *, tolerance: float = 1e-12) -> None:
    """Compares in fp64, relative to a tensor's largest number: sums in another order differ by a few units of 1e-16."""
    pairs = zip([made.value, *made.gradients], [expected.value, *expected.gradients], strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = float(other.abs().max()) if other.numel() else 0.0
        assert float((one - other).abs().max()) <= tolerance * max(1.0, scale)


def assert_no_farther(
    made: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> None:
    """Asserts that gradients in strips are at most twice as far from those in fp64 as plain fp32 gradients are.

    A gradient that is only rounding error (a bias before batch normalisation) is measured against the length of all
    gradients together, of which fp32 resolves a 2**-24th.
    """
    whole = torch.stack([tensor.norm() for tensor in exact]).norm().item()
    for one, other, truth in zip(made, plain, exact, strict=True):
        allowed = 2 * (other.double() - truth).norm().item() + whole * 2.0**-24
        assert (one.double() - truth).norm().item() <= allowed
