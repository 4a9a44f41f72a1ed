"""Heads that run in rows under a budget: the bits of plain PyTorch, and whole logits for whatever else reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from support.runtime.fitted import optimizer_of

CLASSES, WIDTH, ROWS, TOKENS, STEPS = 4099, 16, 2, 48, 2
LOGITS = ROWS * TOKENS * CLASSES * 4
BUDGET = 3 * LOGITS  # less than a plain head takes
ROOMY = 16 * LOGITS


class Language(nn.Module):
    """A model whose head has a weight and perhaps a bias of its own."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens)).relu())


def tokens() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(64, (ROWS, TOKENS), generator=draw) for _ in range(2 * STEPS)]


def made(**options: bool) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def targets_of(given: Tensor) -> Tensor:
    """Some are ignored."""
    return torch.where(given % 9 == 0, -100, given * 61).view(-1)


def loss_of(model: nn.Module, given: Tensor) -> Tensor:
    return functional.cross_entropy(model(given).view(-1, CLASSES), targets_of(given))


def updated(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of=loss_of) -> list[Tensor]:  # type: ignore[no-untyped-def]
    left = []
    for number, given in enumerate(tokens()):
        loss = loss_of(model, given)
        (loss / 2).backward()
        left.append(loss.detach().clone())
        if number % 2:
            updated(optimizer)
    return left


def by_step(run: hydra_ext.Run, model: nn.Module) -> list[Tensor]:
    given, left = tokens(), []
    for first in range(0, len(given), 2):
        left += run.step(given[first : first + 2], lambda each: loss_of(model, each)).losses
    return left


def entered(model: nn.Module, budget: int = BUDGET) -> hydra_ext.offload:
    device, checks = SimulatedDevice(asynchronous=True), Checks(poison_hosts=True)
    return hydra_ext.offload(model, optimizer_of(model), budget=budget, device=device, checks=checks)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_that_does_not_fit_runs_in_rows_with_the_same_bits(looped: bool, bias: bool) -> None:
    plain, model = made(bias=bias), made(bias=bias)
    losses = trained(plain, optimizer_of(plain))
    with entered(model) as run:
        found = trained(model, run.optimizer) if looped else by_step(run, model)
        tally = run.fit.heads.tally
    assert all(map(torch.equal, losses, found))
    assert equal(plain, model)
    assert tally.parts > 3 * len(losses)
    assert tally.wholes == 0
