"""Tensors that share memory, and updates that run behind the next forward: the numbers are those of the plain loop.

Host memory is so slow that every update is still under way when the next operation comes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice, optim
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, OPTIMIZERS, WIDTH, stack, state

TIGHT, ROOMY = 60_000, 2**20
SLOW = 2e7  # bytes/s: some hundredths of a second for a step
Made = tuple[nn.Sequential, torch.optim.Optimizer]
Touch = Callable[[nn.Sequential, torch.optim.Optimizer, int], Any]


@contextmanager
def offloaded(made: Made, *, budget: int = TIGHT, folder: Path | None = None, poison: bool = True) -> Iterator[Run]:
    model, optimizer = made
    spilled: dict[str, Any] = {} if folder is None else {"host_budget": 400_000, "spill_dir": folder}
    with hydra_ext.offload(
        model,
        optimizer,
        budget=budget,
        blocks=list(model.children()),
        device=SimulatedDevice(host_memory_bytes_per_second=SLOW),
        checks=Checks(poison_hosts=poison),
        **spilled,
    ) as run:
        yield run
        assert run.report().windows > 0
        assert run.report().deferred_updates > 0


def pair(name: str) -> tuple[Made, Made]:
    plain = stack()
    model = copy.deepcopy(plain)
    return (plain, OPTIMIZERS[name](plain.parameters())), (model, OPTIMIZERS[name](model.parameters()))


def train(made: Made, touch: Touch, *, keep: bool = False) -> Outcome:
    """``keep``: gradients are set to zero and not to None."""
    model, optimizer = made
    seen: Outcome = []
    for step, batch in enumerate(BATCHES):
        loss = model(batch).pow(2).mean()
        loss.backward()
        seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)
        found = touch(model, optimizer, step)
        if isinstance(found, torch.Tensor):
            seen.append(found.detach().clone())
    return seen


def same(name: str, touch: Touch, *, prepare: Callable[[Made], Any] = lambda made: None, **options: Any) -> None:
    keep = options.pop("keep", False)
    plain, ours = pair(name)
    kept = prepare(plain)
    expected = train(plain, touch, keep=keep)
    del kept
    with offloaded(ours, **options):
        kept = prepare(ours)
        assert_same(expected, train(ours, touch, keep=keep))
        del kept
    assert_same(state(*plain), state(*ours))


# ---- weights --------------------------------------------------------------------------------------------------------


def to_one_vector(model: nn.Module) -> None:
    """All parameters become views of one tensor."""
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


@torch.no_grad()
def _reads(model: nn.Sequential, step: int, order: Callable[[list[Any]], Any]) -> Any:
    if step == 1:
        to_one_vector(model)
    if step >= 1:
        return torch.stack([parameter.sum() for parameter in order(list(model.parameters()))])
    return None


READS: dict[str, Touch] = {
    "first to last": lambda model, _, step: _reads(model, step, list),
    "last to first": lambda model, _, step: _reads(model, step, lambda found: found[::-1]),
    "none": lambda model, _, step: to_one_vector(model) if step == 1 else None,
}


@pytest.mark.parametrize("spilled", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("budget", [TIGHT, ROOMY])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parameters_that_are_views_of_one_vector(
    name: str, read: str, budget: int, spilled: bool, tmp_path: Path
) -> None:
    same(name, READS[read], budget=budget, folder=tmp_path if spilled else None)


def test_views_of_one_vector_without_poison(tmp_path: Path) -> None:
    same("adamw", READS["first to last"], folder=tmp_path, poison=False)


def test_a_parameter_without_elements_in_the_vector() -> None:
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.empty = nn.Parameter(torch.empty(0, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.empty.sum()

    def made() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(*[Empty() for _ in range(4)])
        return model, optim.AdamW(model.parameters(), lr=1e-2)

    @torch.no_grad()
    def touch(model: nn.Sequential, _: torch.optim.Optimizer, step: int) -> torch.Tensor:
        if step == 1:
            to_one_vector(model)
        empty = model[2].empty
        return torch.cat([empty.add_(torch.ones(0, 5)).clone().flatten(), model[1].weight.sum()[None]])

    plain, ours = made(), made()
    expected = train(plain, touch)
    with offloaded(ours):
        assert_same(expected, train(ours, touch))
    assert_same(state(*plain), state(*ours))


def _tie(model: nn.Sequential, step: int) -> None:
    if step == 1:
        model[5].weight.data = model[1].weight.data


@pytest.mark.parametrize("spilled", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("budget", [TIGHT, ROOMY])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_parameters_of_two_blocks_that_become_the_same_bytes(
    name: str, budget: int, spilled: bool, tmp_path: Path
) -> None:
    same(name, lambda model, _, step: _tie(model, step), budget=budget, folder=tmp_path if spilled else None)


def test_their_updates_come_in_the_optimizer_s_order() -> None:
    """And not in that of the forward."""
    plain, ours = stack(), stack()
    for model in (plain, ours):
        model[5].weight.data = model[1].weight.data

    def optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
        return optim.AdamW([*reversed(list(model.parameters()))], lr=0.3, weight_decay=0.5)

    made, expected_made = (ours, optimizer(ours)), (plain, optimizer(plain))
    expected = train(expected_made, lambda *_: None)
    with offloaded(made):
        assert_same(expected, train(made, lambda *_: None))
    assert_same(state(*expected_made), state(*made))


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD], ids=["native", "torch"])
def test_a_frozen_parameter_that_has_the_bytes_of_a_trained_one(make: Callable[..., torch.optim.Optimizer]) -> None:
    """The step changes one row that no sampled fingerprint need see, and bumps the other one's version only."""
    rows = 4096

    def made() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, rows, bias=False))
        model[2].weight.data = model[0].weight.data
        model[2].weight.requires_grad_(False)
        return model, make(model.parameters(), lr=100.0)

    def losses(made: Made) -> Outcome:
        model, optimizer = made
        seen: Outcome = []
        for _ in range(3):
            loss = model(torch.tensor([77])).pow(2).mean()
            loss.backward()
            seen.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    plain, ours = made(), made()
    expected = losses(plain)
    with hydra_ext.offload(*ours, budget=2**23, device=SimulatedDevice(), checks=Checks(poison_hosts=True)):
        assert_same(expected, losses(ours))


# ---- gradients, and tensors of the user's own -----------------------------------------------------------------------


def flat_gradients(made: Made) -> torch.Tensor:
    """Views of one buffer, a usual trick: one zero_(), one norm."""
    parameters = list(made[0].parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


@torch.no_grad()
def _sum_of_gradients(model: nn.Module) -> torch.Tensor:
    return torch.stack([parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None])


TOUCHES: dict[str, Touch] = {
    "nothing": lambda *_: None,
    "reads a parameter": lambda model, *_: model[0].weight.sum(),
    "zeroes each": lambda model, *_: [parameter.grad.zero_() for parameter in model.parameters()] and None,
    "reads them": lambda model, *_: _sum_of_gradients(model),
}


@pytest.mark.parametrize("kept", [True, False], ids=["buffer known", "buffer forgotten"])
@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_gradients_that_are_views_of_one_buffer(name: str, touch: str, kept: bool) -> None:
    def prepare(made: Made) -> torch.Tensor | None:
        flat = flat_gradients(made)
        return flat if kept else None

    same(name, TOUCHES[touch], prepare=prepare, keep=True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_buffer_itself_is_written_behind_a_step(name: str) -> None:
    plain, ours = pair(name)

    def losses(made: Made) -> Outcome:
        model, optimizer = made
        flat = flat_gradients(made)
        seen: Outcome = []
        for batch in BATCHES:
            loss = model(batch).pow(2).mean()
            loss.backward()
            seen += [loss.detach().clone(), flat.clone()]
            optimizer.step()
            flat.zero_()
        return seen

    expected = losses(plain)
    with offloaded(ours):
        assert_same(expected, losses(ours))
    assert_same(state(*plain), state(*ours))


ALIASES: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict()["3.weight"],
    "detached": lambda model: model[3].weight.detach(),
    "array": lambda model: torch.from_numpy(model[3].weight.detach().numpy()),
    "view": lambda model: model[3].weight.data[5],
}


@pytest.mark.parametrize("alias", ALIASES)
def test_what_the_user_has_kept_of_a_weight_shows_the_step_at_once(alias: str) -> None:
    plain, ours = pair("adamw")
    with offloaded(ours) as run:
        train(plain, lambda *_: None)
        train(ours, lambda *_: None)
        run.sync()
        expected, seen = ALIASES[alias](plain[0]), ALIASES[alias](ours[0])
        for model, optimizer in (plain, ours):
            model(BATCHES[0]).pow(2).mean().backward()
            optimizer.step()
        assert torch.equal(expected, seen)
        with pytest.raises(RuntimeError, match="an optimizer step is writing this tensor now"):
            ours[0][5].weight.data_ptr()  # the others' updates are still behind
