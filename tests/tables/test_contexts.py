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
from support.tables import BUDGET, ROWS, WIDTH, Recommender, bits


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
        pytest.raises(AlreadyOffloaded, match=r"'bags\.weight' is inside another offload context"),
        hydra_ext.offload(other, budget=budget, device="simulated"),
    ):
        pass


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.top = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, at: Tensor) -> Tensor:
        return self.top(self.table(at)).squeeze(-1)


def step(optimizer: torch.optim.Optimizer, number: int, *models: Model, clipped: bool) -> None:
    at = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(number))
    torch.stack([model(at).square().mean() for model in models]).sum().backward()
    if clipped:  # reads gradients, which are dense from then on
        torch.nn.utils.clip_grad_norm_([each for model in models for each in model.parameters()], 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("clipped", [False, True])
def test_a_second_native_optimizer_finds_all_rows_up_to_date(clipped: bool) -> None:
    found = []
    for budget in (None, BUDGET):
        model = Model(1)
        first, second = AdamW(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        with nullcontext() if budget is None else offloaded(model, first):
            for number, optimizer in enumerate([first] * 3 + [second] * 2 + [first] * 2):
                step(optimizer, number, model, clipped=clipped and optimizer is second)
        found.append([parameter.detach() for parameter in model.parameters()])
    for ours, plain in zip(*found, strict=True):
        assert bits(ours).equal(bits(plain))


@pytest.mark.parametrize("clipped", [False, True])
def test_one_optimizer_steps_the_tables_of_two_contexts(clipped: bool) -> None:
    found = []
    for budget in (None, BUDGET):
        one, other = Model(1), Model(2)
        optimizer = AdamW([*one.parameters(), *other.parameters()], lr=0.1)
        with nullcontext() if budget is None else offloaded(one, optimizer):
            for number in range(3):
                step(optimizer, number, one, clipped=False)
            with nullcontext() if budget is None else offloaded(other, optimizer):
                for number in range(3, 6):
                    step(optimizer, number, one, other, clipped=clipped)
            for number in range(6, 9):
                step(optimizer, number, one, clipped=False)
        found.append([each.detach() for model in (one, other) for each in model.parameters()])
    for ours, plain in zip(*found, strict=True):
        assert bits(ours).equal(bits(plain))


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hydra_ext.offload(model, optimizer, budget=BUDGET, device="simulated", **options)


def test_the_budget_holds_after_a_hook_has_raised() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("of the hook")

    model = Model(1)
    handle = model.table.weight.register_post_accumulate_grad_hook(fail)
    with offloaded(model, AdamW(model.parameters())):
        with pytest.raises(ValueError, match="of the hook"):
            model(torch.arange(8)).sum().backward()
        handle.remove()
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            model(torch.arange(ROWS // 8))
