"""What modules hold is after a round that was undone, or recomputed, what it would be after a loop."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from support.undone import Failure, Layer, Stack, assert_is_the_loop, squared


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


# ---- one microbatch after the other ---------------------------------------------------------------------------------


class DrawsLater(Layer):
    """From the second step on; then rounds of several microbatches are refused."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not self.draws or random.random() > 0.3 else x


def draws_later(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.draws = bool(x[0, 0] > 0)
    return squared(model, x)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [2, 3, 4])
def test_microbatches_that_run_alone_are_undone_alone(where: str, call: int) -> None:
    report = assert_is_the_loop(lambda: Stack(DrawsLater), Failure(where, 2, 1, call), loss=draws_later)
    assert (report.refusals, report.fallbacks > 0) == (1, True)
