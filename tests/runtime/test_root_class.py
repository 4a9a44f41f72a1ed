"""The root's class inside the context: the user's own in all that can be asked of it, and no other one shows."""

from __future__ import annotations

import abc
import copy
import io
import pickle
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

import hydra_ext
from support.benches import ROOMY, assert_same
from support.runtime.footprint import footprint
from support.runtime.outcomes import POISONED

ONES = torch.ones(1, 4)
REGISTER: dict[str, type] = {}
T = TypeVar("T")


class Registered(nn.Module):
    def __init_subclass__(cls, *, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        REGISTER[kind] = cls


class Meta(type):
    def __new__(mcs, *args: Any, **options: Any) -> Any:
        made = super().__new__(mcs, *args, **options)
        REGISTER[f"made {made.__name__}"] = made
        return made

    def __init__(cls, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        REGISTER[f"initialised {cls.__name__}"] = cls

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AssertionError(name)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class InRegister(_Layer, Registered, kind="one"):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + 1


class WithMeta(_Layer, metaclass=Meta):
    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "__class__"
        super().__setattr__(name, value)


class Abstract(_Layer, abc.ABC):
    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> Any: ...


class Concrete(Abstract):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * 2


class OfKind(_Layer, Generic[T]):
    pass


class Slotted(_Layer):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3


CLASSES = [InRegister, WithMeta, Concrete, OfKind[int], Slotted]


@pytest.mark.parametrize("cls", CLASSES)
def test_nobody_is_told_of_a_subclass(cls: Any) -> None:
    model = cls()
    before, register = footprint(model), dict(REGISTER)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        model(ONES).sum().backward()
        assert register == REGISTER
        assert run.report().windows == 2
    assert register == REGISTER
    assert footprint(model).keys() == before.keys()
    assert type(model) is type(cls())


@pytest.mark.parametrize("cls", CLASSES)
def test_the_model_is_of_the_users_class_in_all_that_can_be_asked(cls: Any) -> None:
    plain, model = cls(), cls()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        assert isinstance(model, type(plain))
        assert isinstance(model, _Layer)
        assert issubclass(type(model), type(plain))
        assert not isinstance(plain, type(model))
        assert isinstance(cls(), type(plain)), "a class check remembers what was asked of another class"
        assert type(model).__bases__ == (type(plain),)
        assert type(model).__name__ == type(plain).__name__
        assert repr(model) == repr(plain)
        with torch.no_grad():
            assert_same([plain(ONES), plain(ONES)], [model(ONES), torch.compile(model, backend="eager")(ONES)])
        assert run.report().windows == 2
        for twin in (copy.deepcopy(model), copy.copy(model)):
            assert type(twin) is type(plain)
            assert_same([plain(ONES)], [twin(ONES)])
        file = io.BytesIO()
        pickle.dump(model, file)
        file.seek(0)
        assert type(pickle.load(file)) is type(plain)  # noqa: S301 - written two lines above
