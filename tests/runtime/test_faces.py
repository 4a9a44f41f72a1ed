"""What a forward sees of a parameter beside its values: the attributes and the class that the user gave it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_ext
from hydra_ext import _C
from hydra_ext.errors import UnsupportedModel
from support.benches import ROOMY, assert_same
from support.runtime.outcomes import POISONED

ONES = torch.ones(1, 4)


class Scaled(nn.Parameter):
    """As libraries make them: methods, a default, and a __setattr__ that has to be asked."""

    gain = 2.0

    def scaled(self) -> torch.Tensor:
        return self * self.gain

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("gain", "grad", "requires_grad", "seen"), name
        super().__setattr__(name, value)


class Slotted(nn.Parameter):
    __slots__ = ("gain",)


class Gained(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = make(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.seen = getattr(self.weight, "seen", 0) + 1  # type: ignore[attr-defined]
        weight = self.weight.scaled() if isinstance(self.weight, Scaled) else self.weight * self.weight.gain
        return F.linear(x, weight)


def test_attributes_are_one_for_both_faces() -> None:
    def work(model: Any) -> list[Any]:
        model.weight.gain = 0.5
        found = [model(ONES)]
        model.weight.gain = torch.full((4,), 3.0)
        found += [model(ONES), str(model.weight.seen), str(sorted(vars(model.weight)))]
        model(ONES).sum().backward()
        return [*found, model.weight.grad]

    model = Gained()
    expected = work(Gained())
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        found = work(model)
        assert run.report().windows > 0
    assert_same(expected, found)
    assert model.weight.seen == 3


def test_a_parameter_of_the_users_class_is_one_in_forward_and_trains() -> None:
    def work(model: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(ONES).sum().backward()
            optimizer.step()
        return [model.weight, model.weight.grad, model.weight.scaled(), copy.deepcopy(model)(ONES)]

    model = Gained(Scaled)
    expected = [value.detach() for value in work(Gained(Scaled))]
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        found = [value.detach() for value in work(model)]
        assert run.report().windows > 0
        assert type(model.weight) is Scaled
    assert_same(expected, found)


@pytest.mark.parametrize("make", [nn.Parameter, Scaled])
def test_the_forwards_parameter_has_the_hosts_class(make: Callable[[torch.Tensor], nn.Parameter]) -> None:
    model: Any = Gained(make)
    model.weight.gain = 1.0
    seen: list[type] = []

    def look(module: Any, _args: Any) -> None:
        assert _C.is_face(module.weight)
        assert isinstance(module.weight, nn.Parameter)
        seen.append(type(module.weight))

    model.register_forward_pre_hook(look)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED):
        model(ONES)
    assert seen == [make]


def test_a_class_whose_values_the_forward_could_not_see_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'weight' is a Slotted, a class with __slots__"):
        hydra_ext.offload(Gained(Slotted), budget=ROOMY)
