"""Parameters that materialize() made get their numbers wherever they are: in a part, or inside another module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hydra_ext
from hydra_ext.construction import fill, materialize
from hydra_ext.errors import ModelChanged
from support.benches import assert_same


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def numbers(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


class Around(nn.Module):
    """Has two models and a layer of its own."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.own, self.second = first, nn.Linear(8, 8), second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.own(self.first(x)))


@pytest.mark.parametrize("from_files", [False, True])
def test_a_module_around_two_models_is_filled(from_files: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Around(build(), build())
    weights = None
    if from_files:
        weights = tmp_path / "model.safetensors"
        save_file(plain.second.state_dict(), weights)
    torch.manual_seed(0)
    model = Around(materialize(build), materialize(build, weights=weights))
    if from_files:
        model.own.load_state_dict(plain.own.state_dict())
    else:  # the same order of draws: first, second, own
        torch.manual_seed(0)
        plain = Around(build(), build())
    with hydra_ext.offload(model, budget=3 * 2**10) as run:
        x = torch.ones(2, 8)
        assert_same([plain(x).detach()], [model(x).detach()])
        assert run.report().evictions > 0
    assert_same(numbers(plain), numbers(model))


def test_a_part_is_filled_alone() -> None:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = materialize(build)
    fill(model[1])
    assert_same(numbers(plain[1]), numbers(model[1]))
    assert all(parameter.is_meta for parameter in model[0].parameters())
    fill(model)
    assert_same(numbers(plain), numbers(model))


def test_a_parameter_on_meta_that_was_not_made_so_is_refused() -> None:
    model = Around(materialize(build), nn.Linear(8, 8, device="meta"))
    with pytest.raises(ModelChanged, match=r"second\.weight .* is not what the constructor made"):
        fill(model)
    assert all(parameter.is_meta for parameter in model.first.parameters())
