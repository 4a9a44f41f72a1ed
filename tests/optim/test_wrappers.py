"""Optimizers inside wrappers, and around other optimizers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.errors import InvalidArgument
from hydra_ext.optim.wrappers import unwrapped


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


class Unmade(torch.optim.Optimizer):
    """Does not call the constructor of its base class, as accelerate's wrapper."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state


class Delegate:
    """Is no optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


class Mirror(torch.optim.Optimizer):
    """Has the attributes of the other one, its hooks among them."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = dict(optimizer.__dict__)
        self.optimizer = optimizer


class Lookahead(torch.optim.Optimizer):
    """Has state of its own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


class UnmadeLookahead(torch.optim.Optimizer):
    """As it is often copied: with state of its own, and without a call of the base's constructor."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)


def test_an_optimizer_with_state_of_its_own_and_no_hooks_is_refused() -> None:
    model = nn.Linear(2, 2)
    around = UnmadeLookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    assert unwrapped(around) is around
    with pytest.raises(InvalidArgument, match="a UnmadeLookahead with state of its own"):
        hydra_ext.offload(model, around, budget=2**20)


def test_wrappers_are_taken_off_down_to_what_makes_the_steps() -> None:
    inner = sgd()
    for wrapped in (inner, Unmade(inner), Delegate(inner), Mirror(inner), Unmade(Delegate(Mirror(inner)))):
        assert unwrapped(wrapped) is inner


def test_an_optimizer_around_another_one_is_no_wrapper() -> None:
    around = Lookahead(sgd())
    assert unwrapped(around) is around
    assert unwrapped(Unmade(around)) is around


def test_what_is_no_optimizer_is_left_for_the_caller_to_refuse() -> None:
    itself = Delegate(None)
    itself._optimizer = itself
    for value in (None, "adam", 3, itself):
        assert unwrapped(value) is value
