"""Losses and gradients with and without a stash, and assertions for an empty stash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.activations.report import StashReport

Loss = Callable[[], Tensor]


def stashed(**options: object) -> hydra_ext.stash:
    return hydra_ext.stash(hydra_ext.Offload(), device="simulated", **options)  # type: ignore[arg-type]


def gradients(model: nn.Module, loss: Loss, inside: AbstractContextManager[object] | None = None) -> list[Tensor]:
    """Returns the loss and all gradients of one step from the same random state, and removes the gradients."""
    torch.manual_seed(11)
    with inside if inside is not None else nullcontext():
        result = loss()
    result.backward()
    found = [result.detach().clone()]
    for parameter in model.parameters():
        found.append(torch.zeros(0) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"number {number} differs"


def assert_empty(report: StashReport) -> None:
    """Asserts that the stash has returned all memory."""
    assert (report.held_bytes, report.host_bytes, report.copies.disk_bytes) == (0, 0, 0)
