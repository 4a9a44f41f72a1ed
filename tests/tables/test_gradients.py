"""Whatever gets the gradient of a table that is stepped by rows finds the one that torch makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext.optim import AdamW, rows
from support.tables import ROWS, WIDTH, bits

BUDGET = 2 * ROWS * WIDTH * 4 - 8  # room for what hooks make of a gradient: the simulated device is charged for it


class Model(nn.Module):
    """Looks rows up twice, so that the order of sums shows."""

    def __init__(self, *, again: bool | None = None, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.top = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)
        if again is not None:
            self.again = nn.Embedding(ROWS, WIDTH, sparse=again)
            self.again.weight = self.table.weight
        self.checkpointed = checkpointed
        self.sparse = False

    def forward(self, at: Tensor) -> Tensor:
        if self.checkpointed:
            found: Tensor = checkpoint(self.look_up, at, use_reentrant=False)
            return found
        return self.look_up(at)

    def look_up(self, at: Tensor) -> Tensor:
        repeated = torch.cat([at[:8], at[:8]])
        if hasattr(self, "again"):
            other = self.again(repeated)
        else:
            other = functional.embedding(repeated, self.table.weight, sparse=self.sparse)
        return self.top(self.table(at) + 3 * other).tanh().squeeze(-1)


Act = Callable[[Model, AdamW, int, list[Tensor]], None]


def batch(number: int) -> Tensor:
    return torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(number))


def backward(model: Model, number: int) -> None:
    model(batch(number)).square().mean().backward()


def step(model: Model, optimizer: AdamW, number: int, _found: list[Tensor]) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def same_as_plain(make: Callable[[], Model], act: Act = step, prepare: Callable[[Model], Any] | None = None) -> None:
    """Expects that four actions give the bits that they give without a context."""
    found: list[list[Tensor]] = []
    for budget in (None, BUDGET):
        model = make()
        optimizer = AdamW(model.parameters(), lr=0.1, eps=1e-2)
        found.append([])
        if prepare is not None:
            prepare(model)
        with (
            nullcontext() if budget is None else hydra_ext.offload(model, optimizer, budget=budget, device="simulated")
        ) as run:
            for number in range(4):
                act(model, optimizer, number, found[-1])
            if run is not None:
                assert run.report().tables is not None
        found[-1] += [parameter.detach() for parameter in model.parameters()]
    for ours, plain in zip(*found, strict=True):
        assert ours.layout == plain.layout
        assert bits(ours).equal(bits(plain))


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda gradient: gradient.clamp(-0.01, 0.01),
    "sum": lambda gradient: gradient + 0.5,
    "norm": lambda gradient: gradient / (gradient.norm() + 1e-6),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_get_the_gradient_as_torch_makes_it(name: str) -> None:
    same_as_plain(Model, prepare=lambda model: model.table.weight.register_hook(HOOKS[name]))


def test_a_hook_may_come_when_there_is_a_gradient_by_rows() -> None:
    def act(model: Model, optimizer: AdamW, number: int, found: list[Tensor]) -> None:
        backward(model, number)
        handle = model.table.weight.register_hook(lambda gradient: gradient + 0.5)
        backward(model, number + 10)
        handle.remove()
        step(model, optimizer, number + 20, found)

    same_as_plain(Model, act)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_that_are_asked_for_are_dense(checkpointed: bool) -> None:
    def act(model: Model, optimizer: AdamW, number: int, found: list[Tensor]) -> None:
        backward(model, number + 10)
        loss = model(batch(number)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found += [gradient.clone() for gradient in gradients]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clamp(-1, 1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(batch(number + 50)).clone())
            found.append(model.table.weight[:60].clone())

    same_as_plain(lambda: Model(checkpointed=checkpointed), act)


def test_a_norm_that_is_no_number_scales_the_whole_gradient() -> None:
    def act(model: Model, optimizer: AdamW, number: int, found: list[Tensor]) -> None:
        (model(batch(number)).square().mean() * torch.nan).backward()
        found.append(hydra_ext.optim.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()

    same_as_plain(Model, act)


@pytest.mark.parametrize("again", [False, True])
def test_modules_of_both_kinds_share_a_table(again: bool) -> None:
    same_as_plain(lambda: Model(again=again))


def test_a_call_may_ask_for_sparse_gradients_of_a_dense_table() -> None:
    def act(model: Model, optimizer: AdamW, number: int, found: list[Tensor]) -> None:
        backward(model, number + 10)
        model.sparse = number == 2
        step(model, optimizer, number, found)

    same_as_plain(Model, act)


def test_steps_by_rows_end_with_a_call_that_asks_for_sparse_gradients() -> None:
    model = Model()
    with hydra_ext.offload(model, AdamW(model.parameters()), budget=BUDGET, device="simulated") as run:
        for sparse in (False, True):
            model.sparse = sparse
            backward(model, 1)
            assert rows.has_rows(model.table.weight) == (not sparse)
            assert run.report().tables.stepped_by_rows == (() if sparse else ("table.weight",))  # type: ignore[union-attr]
    assert type(model.table.weight) is nn.Parameter
