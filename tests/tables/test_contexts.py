"""A table beside other contexts and other optimizers than the one that steps it by rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import AlreadyOffloaded
from hydra_ext.optim import SGD, AdamW
from support.tables import BUDGET, ROWS, WIDTH, Recommender, batches, bits


@pytest.mark.parametrize("budget", [BUDGET, 8 * BUDGET * 10], ids=["by rows", "whole"])
@pytest.mark.parametrize("shared", ["weight", "module"])
def test_a_table_is_in_one_context(shared: str, budget: int) -> None:
    one, other = Recommender(sparse=False), Recommender(sparse=False)
    if shared == "weight":
        other.bags.weight = one.bags.weight
    else:
        other.bags = one.bags
    with (
        hydra_ext.offload(one, AdamW(one.parameters()), budget=BUDGET, device="simulated"),
        pytest.raises(AlreadyOffloaded, match="'bags.weight' is inside another offload context"),
        hydra_ext.offload(other, budget=budget, device="simulated"),
    ):
        pass
