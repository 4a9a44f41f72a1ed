"""A training that is fed by workers has the bits of plain PyTorch with DataLoader, also after a crash in an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_ext
from hydra_ext import data

STEPS_OF_AN_EPOCH = 8


def model() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(32, 4))


def dataset() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(30, 32, generator=made), torch.randint(0, 4, (30,), generator=made))


def weights(trained: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trained.parameters()]


def plain() -> list[Tensor]:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)
    for _ in range(2):
        for x, target in loader:
            nn.functional.cross_entropy(trained(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(trained)


def train(folder: Path, *, crash_after: int | None) -> list[Tensor]:
    """Saves behind every step. Goes on from the newest checkpoint, if there is one."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    loader = data.from_dataset(dataset(), batch_size=4, shuffle=True, num_workers=2)
    with loader, hydra_ext.offload(trained, optimizer, budget="24KiB", device="simulated") as run:
        loaded = run.load(folder, loader=loader) if folder.exists() else None
        steps = 0 if loaded is None else loaded.step
        while steps < 2 * STEPS_OF_AN_EPOCH:
            for x, target in loader:
                nn.functional.cross_entropy(trained(x), target).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                run.save(folder, loader=loader, keep=1)
                if steps == crash_after:
                    return []
        assert run.report().evictions > 0
    return weights(trained)


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def test_a_training_has_the_bits_of_one_with_a_data_loader(tmp_path: Path) -> None:
    expected = plain()
    assert equal(train(tmp_path / "whole", crash_after=None), expected)


def test_a_training_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    expected: Any = plain()
    for crashed in (3, STEPS_OF_AN_EPOCH, STEPS_OF_AN_EPOCH + 5):
        train(tmp_path / "resumed", crash_after=crashed)
        torch.rand(crashed)  # another process would have other numbers
    assert equal(train(tmp_path / "resumed", crash_after=None), expected)
