"""A small model, and stashes with which parts of a model are called again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import hydra_ext
from support.stash.stashed import assert_empty, assert_same, gradients

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


_CALLS: WeakKeyDictionary[nn.Module, list[bool]] = WeakKeyDictionary()  # outside of modules: repeated calls count


class Counting(nn.Linear):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__(64, 64)

    @property
    def calls(self) -> list[bool]:
        """Whether each call had gradients enabled."""
        return _CALLS.setdefault(self, [])

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return super().forward(x).tanh()


def net(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(Counting(), nn.Dropout(0.2), Counting()) for _ in range(depth)])


def recomputing(model: nn.Module, *names: str, **options: Any) -> hydra_ext.stash:
    """Makes a stash that calls the named modules again, and offloads all other saved tensors."""
    return hydra_ext.stash(
        {"": hydra_ext.Offload(), **dict.fromkeys(names, hydra_ext.Recompute())},
        model=model,
        device="simulated",
        **options,
    )


def compare(model: nn.Module, loss: Callable[[], Tensor], *names: str, calls: int) -> hydra_ext.stash:
    """Compares a step with a stash and one without. Asserts the number of repeated calls."""
    expected = gradients(model, loss)
    stash = recomputing(model, *names)
    assert_same(gradients(model, loss, stash), expected)
    assert stash.report().recomputed == calls
    assert_empty(stash.report())
    return stash


def recomputed_blocks(around: hydra_ext.Offload | None) -> Callable[[str, nn.Module], object]:
    """A policy that calls modules with numbered names, such as ``layers.3``, again; ``around`` is the root's policy."""

    def policy(name: str, _module: nn.Module) -> object:
        if name.rpartition(".")[2].isdigit():
            return hydra_ext.Recompute()
        return around if name == "" else None

    return policy
