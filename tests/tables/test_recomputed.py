"""Modules around a table are computed again in backward, as others are, and the table's rows are looked up again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.optim import AdamW
from support.tables import ROWS, WIDTH, bits

BUDGET = ROWS * WIDTH * 4 // 4


class Tower(nn.Module):
    """A table, and a parameter that belongs to the same module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, **options)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, at: Tensor) -> Tensor:
        return (self.table(at) * self.scale).tanh()


class Towers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = Tower(**options), Tower(**options)
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, at: Tensor) -> Tensor:
        return self.top(self.one(at) + self.other(at * 7 % 50)).squeeze(-1)


def batch(number: int) -> Tensor:
    return torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(number))


def trained(model: Towers, steps: int, *, offloaded: dict[str, Any] | None, recompute: bool | None) -> list[Tensor]:
    """Trains with two microbatches a step; in a loop if ``recompute`` is None."""
    optimizer = AdamW(model.parameters(), lr=0.05)
    losses: list[Tensor] = []

    def loss_of(at: Tensor) -> Tensor:
        return model(at).square().mean()

    def loop(run: hydra_ext.Run | None) -> None:
        for number in range(steps):
            given = [batch(2 * number), batch(2 * number + 1)]
            if run is not None and recompute is not None:
                losses.extend(run.step(given, loss_of, recompute=recompute).losses)
                continue
            for at in given:
                loss = loss_of(at)
                (loss / 2).backward()
                losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()

    if offloaded is None:
        loop(None)
    else:
        with hydra_ext.offload(model, optimizer, budget=BUDGET, device="simulated", **offloaded) as run:
            loop(run)
            assert run.report().tables is not None
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"sparse": False, "max_norm": 0.5}], ids=["usual", "max norm"])
@pytest.mark.parametrize("way", ["policy", "step"])
def test_a_module_with_a_table_is_computed_again(way: str, options: dict[str, Any]) -> None:
    plain = trained(Towers(**options), 4, offloaded=None, recompute=None)
    policies = {"one": hydra_ext.Recompute(), "other": hydra_ext.Recompute()}
    ours = trained(
        Towers(**options),
        4,
        offloaded={"activations": policies if way == "policy" else None},
        recompute=None if way == "policy" else True,
    )
    for one, other in zip(ours, plain, strict=True):
        assert bits(one).equal(bits(other))


class Slow(nn.Module):
    """Keeps so much for backward that on a slow link a plan has it computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(20_000, 8), nn.Linear(8, 8)

    def forward(self, at: Tensor) -> Tensor:
        found = self.up(self.table(at))
        for _ in range(10):
            found = torch.tanh(found * 1.1)
        return found.sum(1)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.top = nn.ModuleList(Slow() for _ in range(4)), nn.Linear(8, 1)

    def forward(self, at: Tensor) -> Tensor:
        return self.top(
            torch.stack([part(at * (3 + 2 * number) % 50) for number, part in enumerate(self.parts)]).sum(0)
        )


@pytest.mark.full
def test_a_plan_has_modules_with_tables_computed_again() -> None:
    def go(budget: int | None) -> tuple[list[Tensor], int]:
        model = Sum()
        optimizer = AdamW(model.parameters())
        losses: list[Tensor] = []
        given = [
            torch.randint(0, 50, (16, 40), generator=torch.Generator().manual_seed(number)) for number in range(16)
        ]

        def loss_of(at: Tensor) -> Tensor:
            return model(at).square().mean()

        if budget is None:
            for first in range(0, 16, 4):
                for at in given[first : first + 4]:
                    loss = loss_of(at)
                    (loss / 4).backward()
                    losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            return [*losses, *(parameter.detach() for parameter in model.parameters())], 0
        link = hydra_ext.SimulatedDevice(to_device_bytes_per_second=2e7, to_host_bytes_per_second=2e7)
        with hydra_ext.offload(model, optimizer, budget=budget, device=link) as run:
            for first in range(0, 16, 4):
                losses += run.step(given[first : first + 4], loss_of).losses
            again = 0 if (saved := run.report().activations) is None else saved.recomputed
        return [*losses, *(parameter.detach() for parameter in model.parameters())], again

    (plain, _), (ours, again) = go(None), go(600_000)
    assert again > 0
    for one, other in zip(ours, plain, strict=True):
        assert bits(one).equal(bits(other))
