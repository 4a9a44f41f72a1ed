"""Two models of different kinds, offloaded at once, each under a budget of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.runtime import engine
from support.models.zoo import FAMILIES, Family
from support.runtime.offloaded import Observed, offloaded
from support.training import STEPS, Recipe, build, build_optimizer, differences, parameter_bytes, plain_peak

PAIR = (FAMILIES["gpt2"], FAMILIES["unet"])
RECIPE = Recipe()


@dataclass
class _Trained:
    family: Family
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seen: list[Tensor]

    @classmethod
    def fresh(cls, family: Family) -> _Trained:
        model = build(family, RECIPE)
        return cls(family, model, build_optimizer(model, RECIPE), [])

    def forward(self, step: int) -> Tensor:
        torch.manual_seed(step)
        return self.family.loss(self.model, self.family.batches(1)[step])

    def finish(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach().clone())

    def budget(self) -> int:
        return plain_peak(self.family, RECIPE) + parameter_bytes(self.model) // 4


def _train_interleaved(outer: _Trained, inner: _Trained, first: int, last: int) -> None:
    """The inner model's whole step lies between the outer one's forward and backward."""
    for step in range(first, last):
        loss = outer.forward(step)
        inner.finish(inner.forward(step))
        outer.finish(loss)


def _enter(stack: ExitStack, trained: _Trained, budget: int) -> Observed:
    return stack.enter_context(offloaded(trained.model, trained.optimizer, budget=budget, alone=False))


@pytest.mark.parametrize(
    "order",
    [(0, 1), pytest.param((1, 0), marks=pytest.mark.full)],
    ids=["gpt2 around unet", "unet around gpt2"],
)
def test_each_keeps_to_its_own_budget_and_trains_as_plain_pytorch(order: tuple[int, int]) -> None:
    plain, ours = ([_Trained.fresh(PAIR[index]) for index in order] for _ in range(2))
    _train_interleaved(*plain, 0, STEPS)
    with ExitStack() as stack:
        observed = [_enter(stack, trained, trained.budget()) for trained in ours]
        _train_interleaved(*ours, 0, STEPS)
        for one in observed:
            core = one.run.core
            assert core.gate.opens == 2 * STEPS
            assert one.run.report().peak_bytes <= one.run.budget
            assert core.memory.ledger.in_use == core.pager.resident_bytes
    assert not engine.installed()
    for trained, reference in zip(ours, plain, strict=True):
        assert (
            differences(
                (trained.seen, trained.model, trained.optimizer), (reference.seen, reference.model, reference.optimizer)
            )
            == []
        )


def test_one_that_runs_out_of_memory_leaves_the_other_as_it_was() -> None:
    plain, ours = ([_Trained.fresh(family) for family in PAIR] for _ in range(2))
    _train_interleaved(*plain, 0, 4)
    with ExitStack() as stack:
        observed = [_enter(stack, trained, trained.budget()) for trained in ours]
        _train_interleaved(*ours, 0, 2)
        inner = observed[1].run.core.memory.ledger
        inner.set_limit(inner.limit // 4)
        with pytest.raises(torch.OutOfMemoryError, match="hydra_ext"):
            _train_interleaved(*ours, 2, 3)
        assert not any(one.run.core.gate.open for one in observed)
        inner.set_limit(observed[1].run.budget)
        _train_interleaved(*ours, 2, 4)
    assert not engine.installed()
    for trained, reference in zip(ours, plain, strict=True):
        assert (
            differences(
                (trained.seen, trained.model, trained.optimizer), (reference.seen, reference.model, reference.optimizer)
            )
            == []
        )
